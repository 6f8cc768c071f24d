"""Sends records to Comet (extra `comet`): metrics, text, images, histograms, audio, the config as parameters, and at
the end the best checkpoint. `mode: offline` writes archives to `comet/` of the run directory; `comet upload` sends them
later, those of a restart to the same experiment.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from spmdkit.errors import ConfigError
from spmdkit.metrics.trackers.base import Record, Tracker, names_of
from spmdkit.metrics.trackers.service_run import ServiceRun, connected, flat, package, pixels, settings, tag

KINDS = frozenset({"scalars", "text", "image", "histogram", "audio"})
NEEDS = {"image": "PIL"}
AUTOMATIC = (
    *("log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details", "parse_args", "auto_log_co2"),
    *("auto_param_logging", "auto_metric_logging", "auto_output_logging", "auto_histogram_weight_logging"),
)
"""What Comet would collect by itself: code, the output of the terminal, the machine."""


def open(
    run: Any,
    last_step: int,
    project: str = "spmdkit",
    mode: Literal["online", "offline"] = "online",
    workspace: str | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    best_checkpoint: bool = False,
) -> Tracker:
    """Returns the tracker. `best_checkpoint`: uploads it as a model at the end of the run."""
    comet = package("comet_ml", "comet")
    if mode == "online" and not comet.get_config("comet.api_key"):
        raise ConfigError(
            "tracker comet: Comet has no API key, and mode is online. Set COMET_API_KEY, or mode: offline."
        )
    state = ServiceRun(run.directory, "comet")

    def connect() -> Any:
        logging.getLogger("comet_ml").setLevel(logging.ERROR)
        if state.id is None:
            state.store(secrets.token_hex(16))
        options: dict[str, Any] = dict.fromkeys(AUTOMATIC, False) | {"display_summary_level": 0}
        options |= {"name": name or run.directory.name, "tags": list(tags)}
        options |= {"offline_directory": str(run.directory / "comet")}
        experiment = comet.start(
            project_name=project,
            workspace=workspace,
            experiment_key=state.id,
            mode="get_or_create",
            online=mode == "online",
            experiment_config=comet.ExperimentConfig(**options),
        )
        experiment.log_parameters(flat(settings(run.directory)))
        return experiment

    def write(experiment: Any, kind: str, record: Record) -> None:
        step, values = int(record["step"]), {tag(record, key): record[key] for key in names_of(record, kind)}
        if kind == "scalars":
            experiment.log_metrics(values, step=step)
            return
        for key, value in values.items():
            if kind == "text":
                experiment.log_text(value, step=step, metadata={"name": key})
            elif kind == "image":
                experiment.log_image(pixels(value), name=key, step=step, image_minmax=(0, 255))
            elif kind == "histogram":
                experiment.log_histogram_3d(np.ravel(value), name=key, step=step)
            else:
                sound, rate = np.asarray(value), int(record["rate"])
                experiment.log_audio(sound, sample_rate=rate, file_name=f"{key}.wav", step=step)

    def close(experiment: Any) -> None:
        if best_checkpoint and (path := run.best_checkpoint()) is not None:
            experiment.log_model("best_checkpoint", str(path), metadata={"step": int(path.name)})
        experiment.end()

    return connected(state, connect, write, close, KINDS, NEEDS, best_checkpoint)
