"""The operations: allreduce, allgather, broadcast, alltoall, reducescatter, grouped and asynchronous forms, barrier and
join.

They accept numpy or JAX arrays and return JAX arrays of this process, in the input dtype; 64 bits need
`jax_enable_x64`. They must be called outside `jax.jit`, where ranks can synchronize. Gradients are in gradients.py.
Source: horovod/torch/mpi_ops.py (Horovod 0.28.1); tests/horovod has the assertions of its tests.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.horovod import topology
from spmdkit.horovod.process_sets import ProcessSet, global_process_set
from spmdkit.horovod.queue import Handle


class ReduceOp(enum.StrEnum):
    """How `allreduce` and `reducescatter` combine the inputs of the ranks."""

    Average = "Average"
    Sum = "Sum"
    Adasum = "Adasum"
    Min = "Min"
    Max = "Max"
    Product = "Product"


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    leaves: Sequence[str] | None = None,
) -> Handle:
    """Returns a handle of the reductions of several arrays, which run together in one program.

    `leaves`: their names in a tree, which must be equal on all ranks. Horovod hangs if they differ.
    """
    how, queue = chosen(op, average), process_set.queue()
    if how == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if len(queue.ranks) & (len(queue.ranks) - 1):
            raise NotImplementedError(
                f"Running Adasum with non-power of 2 ranks is not supported yet: found {len(queue.ranks)} ranks. "
                f"Use op=hvd.Average, or 2, 4, 8 ... processes."
            )
    arrays = [local_array(x, "allreduce") for x in tensors]
    error: Exception | None = next(
        (why for x in arrays if (why := unsupported_reason(x, "allreduce", how)) is not None), None
    )
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    want = {"op": "allreduce", "reduce": how.value, **scales, **shapes_of(arrays), "leaves": leaves}
    return queue.enqueue(want, arrays, name, error)


def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    error: Exception | None = None,
) -> Handle:
    """Returns a handle of the concatenations of several arrays. `error`: this rank's error, raised on all ranks."""
    arrays = [local_array(x, "allgather") for x in tensors]
    if any(x.ndim == 0 for x in arrays):
        error = ValueError("tried to allgather a scalar: it has no first dim. Reshape it to (1,).")
    want = {"op": "allgather", "dtypes": [str(x.dtype) for x in arrays], "own_shapes": [list(x.shape) for x in arrays]}
    return process_set.queue().enqueue(want | {"rest": [list(x.shape[1:]) for x in arrays]}, arrays, name, error)


def broadcast_all_async(
    tensors: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    error: Exception | None = None,
    leaves: Sequence[str] | None = None,
) -> Handle:
    """Returns a handle of several arrays of one rank on all of them. `error` and `leaves` as above."""
    queue = process_set.queue()
    arrays = [local_array(x, "broadcast") for x in tensors]
    if root_rank not in queue.ranks:
        error = ValueError(
            f"broadcast from root_rank {root_rank}, which is not one of the ranks {queue.ranks}. Name one of them."
        )
    want = {"op": "broadcast", "root": int(root_rank), **shapes_of(arrays), "leaves": leaves}
    return queue.enqueue(want, arrays, name, error)


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Returns a handle of (the rows that all ranks sent to this rank, the number of rows from each)."""
    queue = process_set.queue()
    x = local_array(tensor, "alltoall")
    numbers, error = splits_of(x, splits, len(queue.ranks))
    want = {"op": "alltoall", "dtypes": [str(x.dtype)], "own_shapes": [list(x.shape)], "rest": [list(x.shape[1:])]}
    return queue.enqueue(want | {"splits": numbers}, [x], name, error)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Returns a handle of this rank's parts of the reductions of several arrays."""
    arrays = [local_array(x, "reducescatter") for x in tensors]
    error: Exception | None = None
    if op not in (Sum, Average):
        error = ValueError(
            f"reducescatter with op={op}: it supports hvd.Sum and hvd.Average. Use allreduce, and select this rank's "
            "rows."
        )
    elif any(x.ndim == 0 for x in arrays):
        error = ValueError("tried to reducescatter a scalar: it has no rows. Use allreduce.")
    else:
        error = next((why for x in arrays if (why := unsupported_reason(x, "reducescatter", op)) is not None), None)
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    want = {"op": "reducescatter", "reduce": getattr(op, "value", str(op)), **scales, **shapes_of(arrays)}
    return process_set.queue().enqueue(want, arrays, name, error)


def allreduce_async(tensor: Any, *args: Any, **options: Any) -> Handle:
    """Returns a handle of the reduction of one array; arguments as in `grouped_allreduce_async`."""
    return grouped_allreduce_async([tensor], *args, **options).of_one()


def allgather_async(tensor: Any, *args: Any, **options: Any) -> Handle:
    """Returns a handle of the concatenation of one array of each rank; arguments as in `grouped_allgather_async`."""
    return grouped_allgather_async([tensor], *args, **options).of_one()


def broadcast_async(tensor: Any, *args: Any, **options: Any) -> Handle:
    """Returns a handle of `root_rank`'s array; arguments as in `broadcast_all_async`."""
    return broadcast_all_async([tensor], *args, **options).of_one()


def reducescatter_async(tensor: Any, *args: Any, **options: Any) -> Handle:
    """Returns a handle of this rank's part of the reduction of one array; arguments as in
    `grouped_reducescatter_async`."""
    return grouped_reducescatter_async([tensor], *args, **options).of_one()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it."""
    queue = process_set.queue()
    queue.wait(queue.enqueue({"op": "barrier"}))


def join(device: int = -1) -> int:
    """Declares that this rank has no more data. Until all ranks have joined, it contributes zeros to the allreduces of
    the other ranks, which divide by the number of all ranks. Returns the rank that joined last (the highest, if several
    joined in one round). `device` is ignored."""
    return global_process_set.queue().join()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Returns an open process set, created by all ranks. Raises ValueError if it is already open."""
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    queue = global_process_set.queue()
    queue.wait(queue.enqueue({"op": "add_process_set", "ranks": wanted.ranks}))
    return topology.register(wanted)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Closes a process set on all ranks, and returns whether it was open. The global set stays open."""
    if not process_set.process_set_id:
        return False
    queue = global_process_set.queue()
    queue.wait(queue.enqueue({"op": "remove_process_set", "ranks": process_set.ranks}))
    topology.world().sets.pop(process_set.process_set_id)
    process_set.close()
    return True


def chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Returns the reduction for `op`, or for the deprecated `average`."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        return Average if average else Sum
    if op is not None and not isinstance(op, ReduceOp):
        raise ValueError(f"op={op!r} is not known. It is hvd.{', hvd.'.join(ReduceOp.__members__)}.")
    return Average if op is None else op


def refuse_traced(tree: Any, what: str) -> None:
    """Raises NotImplementedError inside jit, vmap and other transformations."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.core.Tracer):
            raise NotImplementedError(
                f"hvd.{what} was called while JAX traces a function (jit, vmap, scan, shard_map): found {x.aval}. "
                "Ranks synchronize when the program runs, once for each call, and not in a trace. Compute gradients "
                "in the jitted function and call hvd outside of it, or train with `spmdkit train`, where the whole "
                "step is one program and reduces inside it."
            )


def local_array(x: Any, what: str) -> jax.Array:
    """Returns the argument as an array of this process. Raises ValueError for an array that spans several processes,
    and for integers out of range."""
    refuse_traced(x, what)
    if isinstance(x, jax.Array):
        if not x.is_fully_addressable:
            raise ValueError(
                f"hvd.{what} of an array {x.dtype}{list(x.shape)} that is sharded over several processes. A rank "
                "passes a local array. Use x.addressable_shards, or leave the reduction to jit."
            )
        return x
    whole = np.asarray(x)
    if whole.dtype.kind not in "biufc" and not jnp.issubdtype(whole.dtype, jnp.floating):
        raise ValueError(
            f"hvd.{what} of {type(x).__name__} ({whole.dtype}). It needs arrays of numbers. Use hvd.allgather_object "
            "for objects."
        )
    narrow = jax.dtypes.canonicalize_dtype(whole.dtype)
    if whole.dtype.kind in "iu" and not np.array_equal(whole.astype(narrow), whole):
        raise ValueError(
            f"hvd.{what} of {whole.dtype} with values up to {np.abs(whole).max()}: JAX converts it to {narrow}, which "
            "does not hold them. Call jax.config.update('jax_enable_x64', True) first."
        )
    return jnp.asarray(whole, narrow)


def names_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Returns the names of the leaves of a tree in JAX's form: `['w']`, `.mu['b']`."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def unsupported_reason(x: jax.Array, what: str, how: ReduceOp) -> Exception | None:
    """Returns why a reduction does not support an array, or None."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if x.dtype == jnp.bool_ or (how == Adasum and not floating) or (how in (Min, Max) and jnp.iscomplexobj(x)):
        return ValueError(
            f"{what} with {how.value} of dtype {x.dtype} is not supported. Cast it, for example to float32."
        )
    return None


def splits_of(x: jax.Array, splits: Any, num: int) -> tuple[list[int], Exception | None]:
    """Returns (rows for each rank, the error)."""
    wrong: Callable[[str], tuple[list[int], Exception]] = lambda why: (
        [0] * num,
        ValueError(f"alltoall of {list(x.shape)} over {num} ranks: {why}"),
    )
    if x.ndim == 0:
        return wrong("a scalar has no rows to send. Reshape it to (1,).")
    if splits is None:
        if x.shape[0] % num:
            return wrong(f"the first dim, {x.shape[0]}, is not a multiple of the number of ranks. Pass splits=.")
        return [x.shape[0] // num] * num, None
    numbers = np.asarray(splits)
    if numbers.dtype.kind not in "iu" or numbers.shape != (num,) or (numbers < 0).any():
        return wrong(f"splits are {numbers.tolist()}. They are a list of integers of at least 0, one for each rank.")
    if numbers.sum() > x.shape[0]:
        return wrong(f"splits {numbers.tolist()} add up to {numbers.sum()} rows, and there are {x.shape[0]}.")
    return [int(n) for n in numbers], None


def shapes_of(arrays: Sequence[jax.Array]) -> dict[str, Any]:
    """Returns the request fields of arrays that must be equal on all ranks."""
    return {"dtypes": [str(x.dtype) for x in arrays], "shapes": [list(x.shape) for x in arrays]}
