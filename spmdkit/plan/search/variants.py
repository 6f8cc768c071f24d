"""Changes of a config that keep the mathematics: microbatches, remat, ZeRO stage, mesh. Enumerated, not judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmdkit.config import Config
from spmdkit.program.auto import REMATS, microbatch_counts

Changes = Mapping[str, Any]


def smaller_steps(config: Config, batch_shards: int) -> list[dict[str, Any]]:
    """Returns changes that need less memory than the config, the mildest first: microbatches, then remat, then both."""
    now = config.microbatches if isinstance(config.microbatches, int) else 1
    more = [m for m in microbatch_counts(config, batch_shards) if m > now]
    leaner: Sequence[str] = REMATS[REMATS.index(config.remat) + 1 :] if config.remat in REMATS else ()
    found: list[dict[str, Any]] = [{"microbatches": m} for m in more[:2]]
    found += [{"remat": remat} for remat in leaner[-1:]]
    found += [{"microbatches": m, "remat": leaner[-1]} for m in more[:4] if leaner]
    found += [{"microbatches": m} for m in more[2:]]
    return found
