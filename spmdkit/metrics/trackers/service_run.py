"""The run of a tracking service that belongs to a run directory: its id, and the steps that were sent.

A restart continues the same run of the service. Services cannot delete points, so a step that an earlier process, or
this one before a rollback, has sent is not sent again: a curve has one point per step. With the same program and data
a repeated step has the same values.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from spmdkit.errors import ConfigError
from spmdkit.foundation.files import json_object
from spmdkit.foundation.timeouts import TRACKER_UPLOAD_S
from spmdkit.metrics.trackers.base import Record, Tracker, names_of


class ServiceRun:
    """State in `trackers/NAME.json` of the run directory.

    Attributes:
        id: of the service's run; None before the first start.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / "trackers" / f"{name}.json"
        saved = json_object(self._path.read_bytes()) if self._path.exists() else None
        self.id: str | None = (saved or {}).get("id")
        self._last: dict[str, int] = (saved or {}).get("last", {})

    def store(self, id: str) -> None:
        """Stores the id."""
        self.id = id
        self._write()

    def is_new(self, kind: str, record: Record) -> bool:
        """Returns whether a step of these names was not sent before, and stores that it is sent now."""
        names = "" if kind == "scalars" else f"/{','.join(names_of(record, kind))}"
        key, step = f"{kind}/{record.get('split', 'train')}{names}", int(record["step"])
        if step <= self._last.get(key, -1):
            return False
        self._last[key] = step
        self._write()
        return True

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"id": self.id, "last": self._last}))
        os.replace(new, self._path)


def package(name: str, extra: str) -> Any:
    """Returns an optional package. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"log.trackers names {extra}, but the package {name} cannot be imported ({error}). Records are sent by it. "
            f"Run `pip install 'spmdkit[{extra}]'`, or remove {extra} from log.trackers."
        ) from error


def shown_kinds(kinds: Iterable[str], needs: Mapping[str, str]) -> frozenset[str]:
    """Returns the kinds of records that a service can encode. `needs`: kind -> the optional package that encodes it."""
    is_missing: Callable[[str], bool] = lambda kind: kind in needs and importlib.util.find_spec(needs[kind]) is None
    return frozenset(kind for kind in kinds if not is_missing(kind))


def settings(directory: Path) -> dict[str, Any]:
    """Returns the resolved config of a run, without secrets."""
    path = directory / "config.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.exists() else {}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the hyperparameters of a config: scalars by path, `optimizer.name`. Lists become text."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            values[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return values


def tag(record: Record, name: str) -> str:
    """Returns `train/loss`, `eval/loss`."""
    return f"{record.get('split', 'train')}/{name}"


def pixels(value: Any) -> np.ndarray[Any, Any]:
    """Returns an image as uint8, from floats between 0 and 1."""
    image = np.asarray(value)
    return image if image.dtype == np.uint8 else (np.clip(image, 0, 1) * 255).round().astype(np.uint8)


def connected(
    state: ServiceRun,
    connect: Callable[[], Any],
    write: Callable[[Any, str, Record], None],
    close: Callable[[Any], None],
    kinds: Iterable[str],
    needs: Mapping[str, str],
    uploads: bool,
) -> Tracker:
    """Returns a tracker that sends each step once. It connects in the thread of the trackers, before its first record:
    a slow service does not delay the start. `kinds`, `needs`: see `shown_kinds`."""
    service: list[Any] = []

    def connected_write(kind: str, record: Record) -> None:
        if not state.is_new(kind, record):
            return
        if not service:
            service.append(connect())
        write(service[0], kind, record)

    def close_once() -> None:
        if service:
            close(service.pop())

    close_s = TRACKER_UPLOAD_S if uploads else None
    return Tracker(connected_write, shown_kinds(kinds, needs), close=close_once, close_s=close_s)
