"""`metrics.jsonl`: one JSON object a line, exact numbers, and cut back to the restored step on resume.

Numbers: a float is written as the shortest decimal that reads back as the same float64. A float32 or bfloat16 is
widened first, which is exact, so `2.3` in float32 is written `2.299999952316284`; a reader gets the same bits and need
not know the dtype. NaN and the infinities, which JSON has not, are the strings "NaN", "Infinity", "-Infinity": every
strict parser takes the line, `float(...)` in Python and `Number(...)` in JavaScript give the number back, and the three
stay apart (null would not tell them apart).

Durability: each record is one `write` to the file, with no buffer of ours, so a killed process loses nothing that was
written. `sync` waits for the disk; called before a checkpoint is saved, it makes sure that no checkpoint is newer than
its metrics even when the power fails.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmdkit.errors import UserCodeError
from spmdkit.files import not_writable, replace, strict_json

FIRST_KEYS = ("step", "split", "loss")
LAST_KEYS = ("examples_per_s", "step_time_s", "input_wait_s")
NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Appends records to `path`, after cutting back what an interrupted run wrote past its last checkpoint.

    `keep_through_step`: the step that was restored (0: start anew). Lines of later steps and lines that are no record
    (torn by a kill, garbage) are dropped; the other lines keep their order and their bytes. None keeps all steps.
    `.dropped_steps` and `.dropped_damaged` count what went away. The file is replaced in one rename, so a kill at any
    moment leaves the old file or the new one.

    Key order of a line: step, split, loss, the others sorted, examples_per_s, step_time_s, input_wait_s.

    Raises ConfigError when the file cannot be opened or written (folder not writable, disk full); a line that did not
    fit is taken back, so the file stays whole. Raises UserCodeError for a metric that is not one number.
    """

    def __init__(self, path: str | os.PathLike[str], keep_through_step: int | None) -> None:
        self.path = Path(path)
        self.dropped_steps = 0
        self.dropped_damaged = 0
        try:
            if self.path.exists():
                self._cut_back(keep_through_step)
            self._descriptor: int | None = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise not_writable(self.path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line and hands it to the operating system before it returns."""
        assert self._descriptor is not None, "write after close"
        line = record_line(record).encode()
        size_before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # a disk that fills up takes part of a line, and refuses the rest
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, size_before)
            raise not_writable(self.path, error) from error

    def sync(self) -> None:
        """Waits until every line so far is on the disk. A few ms on a local disk: once per checkpoint, not per line."""
        assert self._descriptor is not None, "sync after close"
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise not_writable(self.path, error) from error

    def close(self) -> None:
        """Syncs and closes the file. May be called twice."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise not_writable(self.path, error) from error
            finally:
                os.close(descriptor)

    def _cut_back(self, keep_through_step: int | None) -> None:
        content = self.path.read_bytes()
        kept = []
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            record = _parse_object(line)
            step = record.get("step") if record is not None else None
            if not isinstance(step, int) or isinstance(step, bool):
                self.dropped_damaged += 1
            elif keep_through_step is not None and step > keep_through_step:
                self.dropped_steps += 1
            else:
                kept.append(line + b"\n")
        if b"".join(kept) != content:
            replace(self.path, b"".join(kept))


def record_line(record: Mapping[str, Any]) -> str:
    """Returns a record as one line of strict JSON that ends in a newline; see the file's docstring for its numbers."""
    step = plain_number("step", record.get("step"))
    if not isinstance(step, int) or isinstance(step, bool):
        raise UserCodeError(
            f"metrics record: step is {record.get('step')!r}. A record belongs to one step, a whole number."
            ' Pass {"step": int(step), ...}.'
        )
    middle = sorted(set(record) - set(FIRST_KEYS) - set(LAST_KEYS))
    keys = [k for k in (*FIRST_KEYS, *middle, *LAST_KEYS) if k in record]
    values = {key: str(record[key]) if key == "split" else plain_number(key, record[key]) for key in keys}
    return json.dumps(strict_json(values), allow_nan=False, ensure_ascii=True) + "\n"


def plain_number(name: str, value: Any) -> int | float | bool:
    """Returns a Python number of the same value: from numpy, jax and bfloat16 scalars or 0-d arrays.

    Raises UserCodeError when `value` is not one number (an array with several elements, a string, None).
    """
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        return value
    shape = getattr(value, "shape", None)
    if shape != () or not hasattr(value, "dtype"):
        found = f"an array of shape {tuple(shape)}" if shape is not None else f"a {type(value).__name__}"
        raise UserCodeError(
            f"metric '{name}' is {found}. A metric is one number per step."
            " Return sk.mean(values) for it, or leave it out of the metrics."
        )
    array = np.asarray(value)
    if array.dtype.kind == "b":
        return bool(array)
    if array.dtype.kind in "iu":
        return int(array)
    if array.dtype.kind in "cOSUMm":
        raise UserCodeError(
            f"metric '{name}' has dtype {array.dtype}. A metric is one real number per step."
            " Convert it to a float, or leave it out of the metrics."
        )
    return float(array.astype(np.float64))


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the JSON objects of a `.jsonl` file in order, without the lines that are none; [] when there is no file.

    "NaN", "Infinity" and "-Infinity" come back as floats. For metrics and events, also of a run that is still going.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    records = [_parse_object(line) for line in content.split(b"\n") if line.strip()]
    return [{k: _from_strict(v) for k, v in record.items()} for record in records if record is not None]


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


def _from_strict(value: Any) -> Any:
    return NONFINITE.get(value, value) if isinstance(value, str) else value
