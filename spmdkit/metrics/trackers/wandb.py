"""Sends records to Weights & Biases (extra `wandb`): metrics, text, images, histograms, audio, the config, and at the
end the best checkpoint. `mode: offline` writes to `wandb/` of the run directory; `wandb sync` uploads it later.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from spmdkit.foundation.timeouts import TRACKER_CONNECT_S
from spmdkit.metrics.trackers.base import Record, Tracker, names_of
from spmdkit.metrics.trackers.service_run import ServiceRun, connected, package, pixels, settings, tag

KINDS = frozenset({"scalars", "text", "image", "histogram", "audio"})
NEEDS = {"image": "PIL", "audio": "soundfile"}


def open(
    run: Any,
    last_step: int,
    project: str = "spmdkit",
    mode: Literal["online", "offline"] = "online",
    entity: str | None = None,
    group: str | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    best_checkpoint: bool = False,
) -> Tracker:
    """Returns the tracker. `best_checkpoint`: uploads it as an artifact at the end of the run."""
    wandb = package("wandb", "wandb")
    state = ServiceRun(run.directory, "wandb")

    def connect() -> Any:
        if state.id is None:
            state.store(secrets.token_hex(4))
        return wandb.init(
            project=project,
            entity=entity,
            group=group,
            name=name or run.directory.name,
            tags=list(tags),
            id=state.id,
            resume="allow",
            mode=mode,
            dir=str(run.directory),
            config=settings(run.directory),
            settings=wandb.Settings(silent=True, console="off", init_timeout=TRACKER_CONNECT_S),
        )

    def write(service: Any, kind: str, record: Record) -> None:
        shown = {tag(record, key): _shown(wandb, kind, record, record[key]) for key in names_of(record, kind)}
        service.log(shown, step=int(record["step"]))

    def close(service: Any) -> None:
        if best_checkpoint and (path := run.best_checkpoint()) is not None:
            artifact = wandb.Artifact(f"{run.directory.name}-best", type="model", metadata={"step": int(path.name)})
            artifact.add_dir(str(path))
            service.log_artifact(artifact)
        service.finish()

    return connected(state, connect, write, close, KINDS, NEEDS, best_checkpoint)


def _shown(wandb: Any, kind: str, record: Record, value: Any) -> Any:
    if kind == "image":
        return wandb.Image(pixels(value))
    if kind == "histogram":
        return wandb.Histogram(np.ravel(value))
    if kind == "audio":
        return wandb.Audio(np.asarray(value), sample_rate=int(record["rate"]))
    return wandb.Html(f"<pre>{_escaped(value)}</pre>") if kind == "text" else value


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
