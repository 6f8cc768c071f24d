"""Changes of a config that keep the mathematics: microbatches, remat, ZeRO stage, mesh. Enumerated, not judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmdkit.config import Config

Changes = Mapping[str, Any]
REMATS = ("none", "dots", "full")
"""Remat policies from the most memory to the least."""
MOST_MICROBATCHES = 64


def microbatch_counts(config: Config, batch_shards: int) -> list[int]:
    """Returns the microbatch counts, powers of two, that cut the batch evenly over so many shards."""
    rows = config.batch_size // batch_shards
    return [
        m for m in (2**i for i in range(MOST_MICROBATCHES.bit_length())) if m <= MOST_MICROBATCHES and rows % m == 0
    ]


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
