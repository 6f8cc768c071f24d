"""The blocking operations, with Horovod's gradients under `jax.grad` outside jit. These are Horovod's rules, not
derivatives of a global loss:

| call | gradient with respect to this rank's input, for the gradient g of its output |
| --- | --- |
| allreduce Sum, Average | the same allreduce of g, scales included: size times the mean for Sum, the mean for Average |
| allgather | this rank's rows of the *mean* of g over ranks |
| broadcast | the *mean* of g over ranks on the root, zero on others |
| alltoall | g sent back to the origin of each row |
| reducescatter | allgather of g; times size for Sum |

For a loss summed over ranks, the true gradient has the sum instead of the mean: scale by `hvd.size()`, or use `spmdkit
train`, which computes gradients of the mean over the global batch. Horovod's rules for Min, Max, Product and Adasum
reduce g in the same way, which is not a derivative. They raise here. Source: the `backward` functions of
horovod/torch/mpi_ops.py (0.28.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.horovod import operations as ops
from spmdkit.horovod.compression import Compression, Compressor, compressed
from spmdkit.horovod.operations import Average, ReduceOp, Sum
from spmdkit.horovod.process_sets import ProcessSet, global_process_set
from spmdkit.horovod.queue import synchronize


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Returns the reduction of one array over the ranks, by default the mean; integers are truncated.

    Raises:
        HorovodInternalError: on every rank, if shapes, dtypes, scales or operations differ between ranks.
    """
    scales = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scales, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[jax.Array]:
    """Returns the reductions of several arrays in one program, by default the means."""
    how, scales = ops.chosen(op, average), (prescale_factor, postscale_factor)

    def forward(*arrays: Any) -> list[jax.Array]:
        out: list[jax.Array] = synchronize(ops.grouped_allreduce_async(arrays, None, name, how, *scales, process_set))
        return out

    def backward(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        if how not in (Sum, Average):
            raise NotImplementedError(
                f"the gradient of hvd.allreduce with {how.value}: Horovod reduces the gradients with {how.value} too, "
                "which is not a derivative. Use jax.lax.stop_gradient around it, or Sum or Average."
            )
        out: list[jax.Array] = synchronize(
            ops.grouped_allreduce_async(gradients, None, None, how, *scales, process_set)
        )
        return out

    return compressed(compression, lambda arrays: _differentiable(forward, backward, arrays), tensors)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> jax.Array:
    """Returns the arrays of all ranks, concatenated along dim 0. Their sizes of dim 0 may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[jax.Array]:
    """Returns the concatenations of several arrays."""
    rows = [np.shape(x)[0] if np.ndim(x) else 0 for x in tensors]

    def forward(*arrays: Any) -> list[jax.Array]:
        out: list[jax.Array] = synchronize(ops.grouped_allgather_async(arrays, name, process_set))
        return out

    def backward(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        means = synchronize(ops.grouped_allreduce_async(gradients, op=Average, process_set=process_set))
        all_rows = synchronize(ops.allgather_async(np.array([rows], np.int32), process_set=process_set))
        begins = np.asarray(all_rows)[: process_set.rank()].sum(0)
        return [mean[begin : begin + n] for mean, begin, n in zip(means, begins, rows, strict=True)]

    return _differentiable(forward, backward, tensors)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Returns `root_rank`'s array on every rank, bitwise. `root_rank` is a global rank, also in a process set."""

    def forward(array: Any) -> list[jax.Array]:
        return [synchronize(ops.broadcast_async(array, root_rank, name, process_set))]

    def backward(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        means = synchronize(ops.grouped_allreduce_async(gradients, op=Average, process_set=process_set))
        is_root = process_set.ranks[process_set.rank() or 0] == root_rank
        return [mean if is_root else jnp.zeros_like(mean) for mean in means]

    return _differentiable(forward, backward, [tensor])[0]


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the rows that all ranks sent to this rank. With `splits` (rows for each rank), also returns the number of
    rows from each."""

    def forward(array: Any) -> list[jax.Array]:
        return list(synchronize(ops.alltoall_async(array, splits, name, process_set)))

    def backward(gradients: Sequence[jax.Array], received: jax.Array) -> list[jax.Array]:
        back = synchronize(ops.alltoall_async(gradients[0], received, process_set=process_set))[0]
        unsent = np.shape(tensor)[0] - back.shape[0]
        return [jnp.concatenate([back, jnp.zeros((unsent, *back.shape[1:]), back.dtype)])]

    out, received = _differentiable(forward, backward, [tensor], num_constant=1)
    return out if splits is None else (out, received)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> jax.Array:
    """Returns this rank's rows of the reduction. If rows do not divide evenly, the first ranks have one more."""
    scales = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, op, process_set, *scales)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[jax.Array]:
    """Returns this rank's parts of the reductions of several arrays."""

    def forward(*arrays: Any) -> list[jax.Array]:
        scales = (prescale_factor, postscale_factor)
        out: list[jax.Array] = synchronize(ops.grouped_reducescatter_async(arrays, name, op, process_set, *scales))
        return out

    def backward(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)
        scaled = [g * jnp.asarray(factor, g.dtype) for g in gradients]
        out: list[jax.Array] = synchronize(ops.grouped_allgather_async(scaled, process_set=process_set))
        return out

    return compressed(compression, lambda arrays: _differentiable(forward, backward, arrays), tensors)


def _differentiable(
    forward: Callable[..., list[jax.Array]],
    backward: Callable[..., list[jax.Array]],
    tensors: Sequence[Any],
    num_constant: int = 0,
) -> list[jax.Array]:
    """Returns `forward(*tensors)` with `backward(gradients, *constants)` as its rule; the last `num_constant` results
    have no gradient."""
    if not any(isinstance(x, jax.core.Tracer) for x in tensors):
        return forward(*tensors)
    call = jax.custom_vjp(lambda *arrays: tuple(forward(*arrays)))

    def keep(*arrays: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        results = tuple(forward(*arrays))
        return results, results[len(results) - num_constant :]

    def rule(constants: tuple[jax.Array, ...], gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(backward(gradients[: len(gradients) - num_constant], *constants))

    call.defvjp(keep, rule)
    return list(call(*tensors))
