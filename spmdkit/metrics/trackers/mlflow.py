"""Sends records to MLflow (extra `mlflow`): metrics, text and images, the config as parameters, and at the end the best
checkpoint. Without `uri` and MLFLOW_TRACKING_URI it writes to `mlflow.db` in the parent folder of the run directory,
which `mlflow ui --backend-store-uri sqlite:///mlflow.db` shows.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from spmdkit.metrics.trackers.base import Record, Tracker, names_of
from spmdkit.metrics.trackers.service_run import ServiceRun, connected, flat, package, pixels, settings, tag

KINDS = frozenset({"scalars", "text", "image"})
NEEDS = {"image": "PIL"}
MAX_PARAMS, MAX_TEXT = 100, 6000
"""Parameters in one call, and characters of a value, that a server accepts."""


def open(
    run: Any,
    last_step: int,
    uri: str | None = None,
    experiment: str = "spmdkit",
    name: str | None = None,
    best_checkpoint: bool = False,
) -> Tracker:
    """Returns the tracker. `best_checkpoint`: uploads it as an artifact at the end of the run."""
    package("mlflow", "mlflow")
    state, folder = ServiceRun(run.directory, "mlflow"), run.directory.parent
    address = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"

    def connect() -> Any:
        client = package("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=address)
        if state.id is None:
            artifacts = (folder / "mlartifacts").as_uri() if address.startswith("sqlite:") else None
            state.store(
                client.create_run(
                    _experiment(client, experiment, artifacts), run_name=name or run.directory.name
                ).info.run_id
            )
        client.update_run(state.id, status="RUNNING")
        _send_settings(client, state.id, flat(settings(run.directory)))
        return client

    def write(client: Any, kind: str, record: Record) -> None:
        step, names = int(record["step"]), names_of(record, kind)
        if kind == "scalars":
            metric, now = package("mlflow.entities", "mlflow").Metric, int(time.time() * 1000)
            values = [metric(_valid(tag(record, key)), float(record[key]), now, step) for key in names]
            client.log_batch(state.id, metrics=values)
        for key in names if kind == "text" else ():
            client.log_text(state.id, record[key], f"text/{_valid(key)}/{step:09}.txt")
        for key in names if kind == "image" else ():
            client.log_image(state.id, pixels(record[key]), key=_valid(key), step=step)

    def close(client: Any) -> None:
        if best_checkpoint and (path := run.best_checkpoint()) is not None:
            client.log_artifacts(state.id, str(path), f"best_checkpoint/{path.name}")
        client.set_terminated(state.id)

    return connected(state, connect, write, close, KINDS, NEEDS, best_checkpoint)


def _experiment(client: Any, name: str, artifacts: str | None) -> str:
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name, artifact_location=artifacts) if found is None else found.experiment_id)


def _send_settings(client: Any, run_id: str | None, values: dict[str, Any]) -> None:
    """Sends parameters. One that changed after a restart is a tag, since MLflow keeps the first value."""
    entities, known = package("mlflow.entities", "mlflow"), client.get_run(run_id).data.params
    new = [entities.Param(key, str(x)[:MAX_TEXT]) for key, x in values.items() if key not in known]
    for start in range(0, len(new), MAX_PARAMS):
        client.log_batch(run_id, params=new[start : start + MAX_PARAMS])
    for key, value in values.items():
        if key in known and known[key] != str(value)[:MAX_TEXT]:
            client.set_tag(run_id, f"changed.{key}", str(value)[:MAX_TEXT])


def _valid(name: str) -> str:
    """Returns a name with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name)
