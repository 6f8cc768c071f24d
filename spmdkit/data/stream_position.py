"""The position of a stream as JSON, for the record of a checkpoint.

    {"num_shards": 16, "batch": 40, "shards": {"3": {"epoch": 0, "given": 80, "mark": STATE, "since": 12,
                                                     "checksum": 1234, "ended": false}}}

`batch` is the number of the last batch that was used. A shard has given `given` examples; it continues `since` examples
after `mark`, a state of the iterator, or after the start of its epoch if `mark` is null. `checksum` is that of these
examples.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmdkit.errors import CheckpointError, UserCodeError


def pack(state: Any) -> Any:
    """Returns a state as JSON: bytes, arrays, tuples and dicts with other keys are tagged.

    Raises:
        UserCodeError: it holds anything else.
    """
    if state is None or isinstance(state, bool | int | str) or (isinstance(state, float) and math.isfinite(state)):
        return state
    if isinstance(state, float):
        return {"\0float": str(state)}
    if isinstance(state, bytes):
        return {"\0bytes": _text(state)}
    if type(state).__module__ == "torch" and hasattr(state, "numpy"):
        return {"\0tensor": pack(state.numpy())}
    if isinstance(state, np.generic):
        return pack(state.item())
    if isinstance(state, np.ndarray) and not state.dtype.hasobject:
        return {"\0array": [state.dtype.str, list(state.shape), _text(state.tobytes())]}
    if isinstance(state, tuple):
        return {"\0tuple": [pack(x) for x in state]}
    if isinstance(state, list):
        return [pack(x) for x in state]
    if isinstance(state, Mapping):
        if all(isinstance(key, str) and not key.startswith("\0") for key in state):
            return {key: pack(x) for key, x in state.items()}
        return {"\0dict": [[pack(key), pack(x)] for key, x in state.items()]}
    raise UserCodeError(
        f"the state of a stream holds a {type(state).__module__}.{type(state).__qualname__}. A checkpoint stores "
        "numbers, text, bytes, numpy arrays, lists, tuples and dicts. Return such values."
    )


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _bytes(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(packed, list):
        return [unpack(x) for x in packed]
    if not isinstance(packed, dict):
        return packed
    tag: str = next(iter(packed), "")
    value: Any = packed.get(tag)
    if tag == "\0float":
        return float(value)
    if tag == "\0bytes":
        return _bytes(value)
    if tag == "\0tensor":
        import torch

        return torch.from_numpy(unpack(value).copy())
    if tag == "\0array":
        dtype, shape, text = value
        return np.frombuffer(_bytes(text), dtype).reshape(shape).copy()
    if tag == "\0tuple":
        return tuple(map(unpack, value))
    if tag == "\0dict":
        return {unpack(key): unpack(x) for key, x in value}
    return {key: unpack(x) for key, x in packed.items()}


def merge_positions(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the position of a stream from the parts of all processes. Of several that read a shard, the first counts.

    Raises:
        CheckpointError: they have read different numbers of examples of it.
    """
    shards: dict[str, Any] = {}
    for part in parts:
        for name, at in part["shards"].items():
            if shards.setdefault(name, at)["given"] != at["given"]:
                raise CheckpointError(
                    f"the position of shard {name} of train_data differs between processes: {shards[name]['given']} "
                    f"and {at['given']} examples. All processes that read a shard must read the same examples."
                )
    return {**parts[0], "shards": shards}
