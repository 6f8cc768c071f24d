"""The lines of `metrics.jsonl`: one JSON object each, with exact numbers. trackers/jsonl.py writes the file.

A float is written as the shortest decimal that parses to the same float64; float32 and bfloat16 are widened first,
which is exact. NaN and the infinities, which JSON does not support, are the strings "NaN", "Infinity", "-Infinity":
strict parsers accept the line, and `float(...)` in Python and `Number(...)` in JavaScript return the number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import files
from spmdkit.foundation.constants import MEASURED
from spmdkit.foundation.files import json_object, strict_json

FIRST_KEYS = ("step", "split", "epoch", "loss")
LAST_KEYS = MEASURED
NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def record_line(record: Mapping[str, Any], arrays: bool = False) -> str:
    """Returns a record as one line of strict JSON with a final newline; see the module docstring for its numbers.

    Args:
        arrays: values may be lists of numbers, and text.
    """
    step = plain_number("step", record.get("step"))
    if not isinstance(step, int) or isinstance(step, bool):
        raise UserCodeError(
            f"metrics record: step is {record.get('step')!r}. A record belongs to one step, a whole number."
            ' Pass {"step": int(step), ...}.'
        )
    middle = sorted(set(record) - set(FIRST_KEYS) - set(LAST_KEYS))
    keys = [k for k in (*FIRST_KEYS, *middle, *LAST_KEYS) if k in record]
    plain: Callable[[str, Any], Any] = lambda key, x: (
        x if type(x) is float or (arrays and isinstance(x, list | str)) else plain_number(key, x)
    )
    values = {key: str(record[key]) if key == "split" else plain(key, record[key]) for key in keys}
    return _encode(strict_json(values)) + "\n"


_encode = json.JSONEncoder(allow_nan=False).encode
"""Created once: `json.dumps` with arguments creates an encoder per call."""


def plain_number(name: str, value: Any) -> int | float | bool:
    """Returns a Python number of the same value, from numpy, jax and bfloat16 scalars or 0-d arrays.

    Raises UserCodeError if `value` is not one number (an array with several elements, a string, None).
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
    if array.dtype.kind in "cOSUMm":
        raise UserCodeError(
            f"metric '{name}' has dtype {array.dtype}. A metric is one real number per step."
            " Convert it to a float, or leave it out of the metrics."
        )
    plain: int | float | bool = (array if array.dtype.kind in "biu" else array.astype(np.float64)).item()
    return plain


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the JSON objects of a `.jsonl` file in order, without invalid lines; [] if the file does not exist.

    "NaN", "Infinity" and "-Infinity" are returned as floats. For metrics and events, also those of an active run.
    """
    try:
        content = files.read_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or error}. It must be a regular file of at most "
            f"{files.MAX_READ_BYTES} bytes. Move it away, or name another run."
        ) from error
    records = [json_object(line) for line in content.split(b"\n") if line.strip()]
    return [{k: _from_strict(v) for k, v in record.items()} for record in records if record is not None]


def _from_strict(value: Any) -> Any:
    return NONFINITE.get(value, value) if isinstance(value, str) else value
