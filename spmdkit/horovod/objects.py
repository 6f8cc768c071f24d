"""Sends Python objects and pytrees between ranks, as JSON and arrays. Pickle is not used, since it can execute code.

Supported: None, bool, int, float, str, bytes, list, tuple, dict with keys of these, numpy scalars and arrays, JAX
arrays (received as numpy). A type without a JSON form is encoded as an object with its kind as the key. Source:
horovod/torch/functions.py, which uses cloudpickle.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.horovod import operations as ops
from spmdkit.horovod.process_sets import ProcessSet, global_process_set
from spmdkit.horovod.queue import synchronize


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns `root_rank`'s object on every rank. For an object without a JSON form the root raises TypeError with its
    path, and the other ranks raise `HorovodInternalError`."""
    is_root, of = process_set.queue().rank == root_rank, {"root_rank": root_rank, "process_set": process_set}
    text, error = _encoded(obj) if is_root else (b"", None)
    size = synchronize(
        ops.broadcast_async(np.array(len(text), np.int32), name=name and f"{name}.sz", error=error, **of)
    )
    data = np.frombuffer(text, np.uint8) if is_root else np.zeros(int(size), np.uint8)
    got = synchronize(ops.broadcast_async(data, name=name and f"{name}.t", **of))
    return obj if is_root else _object(json.loads(np.asarray(got).tobytes()))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks, in rank order, on every rank."""
    text, error = _encoded(obj)
    data = np.frombuffer(text, np.uint8)
    whole = synchronize(ops.allgather_async(data, name=name, process_set=process_set, error=error))
    return [_object(json.loads(text)) for text in np.asarray(whole).tobytes().splitlines()]


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """Returns `root_rank`'s values of a pytree of arrays and numbers on every rank, in one program. Arrays do not
    change in place: use the result."""
    leaves, form = jax.tree.flatten(params)
    handle = ops.broadcast_all_async(leaves, root_rank, process_set=process_set, leaves=ops.names_of(params))
    values = synchronize(handle)
    out = [type(x)(y.item()) if isinstance(x, bool | int | float) else y for x, y in zip(leaves, values, strict=True)]
    return jax.tree.unflatten(form, out)


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns `root_rank`'s optimizer state, a pytree of optax's `init`, on every rank. A transformation has no state
    and is returned unchanged. `model` is ignored."""
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return optimizer
    return broadcast_parameters(optimizer, root_rank, process_set)


def _encoded(obj: Any) -> tuple[bytes, TypeError | None]:
    """Returns (the object as a line of JSON, the error with the path of a part without a JSON form).

    The line is padded with spaces to a power of two of bytes, so that few programs are compiled.
    """
    try:
        text, error = json.dumps(_plain(obj, "the object")).encode(), None
    except TypeError as wrong:
        text, error = b"", wrong
    return text.ljust((1 << max(8, len(text).bit_length())) - 1) + b"\n", error


def _plain(obj: Any, place: str) -> Any:
    if obj is None or type(obj) in (bool, int, float, str):
        return obj
    if type(obj) in (list, tuple):
        parts = [_plain(x, f"{place}[{i}]") for i, x in enumerate(obj)]
        return parts if type(obj) is list else {"tuple": parts}
    if type(obj) is dict:
        return {"dict": [[_plain(k, f"a key of {place}"), _plain(x, f"{place}[{k!r}]")] for k, x in obj.items()]}
    if type(obj) is bytes:
        return {"bytes": base64.b64encode(obj).decode()}
    if isinstance(obj, jax.Array | np.ndarray | np.generic) and not jax.numpy.issubdtype(
        obj.dtype, jax.dtypes.extended
    ):
        array = np.asarray(obj)
        if array.dtype.kind not in "OSUVmM" or jnp.issubdtype(array.dtype, jnp.floating):
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            return {"array": [str(array.dtype), list(array.shape), data, isinstance(obj, np.generic)]}
    raise TypeError(
        f"{place} is a {type(obj).__name__}, which has no JSON form. Objects between ranks are None, numbers, str, "
        "bytes, list, tuple, dict and arrays; they are not pickled. Send its parts, and rebuild it on each rank."
    )


def _object(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_object(x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind in ("tuple", "dict"):
        return {"tuple": tuple, "dict": dict}[kind](_object(x) for x in value)
    if kind == "bytes":
        return base64.b64decode(value)
    dtype, shape, data, is_scalar = value
    array = np.frombuffer(base64.b64decode(data), jnp.dtype(dtype)).reshape(shape).copy()
    return array[()] if is_scalar else array
