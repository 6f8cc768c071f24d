"""`DistributedOptimizer`, an optax transformation that reduces its gradients over the ranks outside jit, and
`sparse_allreduce_async`.

Source: horovod/torch/optimizer.py, horovod/tensorflow/gradient_aggregation.py (Horovod 0.28.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import sparse

from spmdkit.horovod import operations as ops
from spmdkit.horovod.compression import Compression, Compressor, compressed
from spmdkit.horovod.operations import Adasum, Average, ReduceOp
from spmdkit.horovod.process_sets import ProcessSet, global_process_set
from spmdkit.horovod.queue import synchronize
from spmdkit.horovod.unsupported import absent_from


class DistributedState(NamedTuple):
    """The state of a `DistributedOptimizer`.

    Attributes:
        inner: the state of the inner transformation.
        passes: the number of gradients since the last step, int32, on the host.
        sums: their sum on this rank, or None with one pass per step.
    """

    inner: Any
    passes: Any
    sums: Any


class Distributed(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """The result of `DistributedOptimizer`. Unsupported methods of Horovod raise with the reason."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return absent_from("DistributedOptimizer", name)


def DistributedOptimizer(
    optimizer: optax.GradientTransformation,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    average_aggregated_gradients: bool = False,
) -> Distributed:
    """Returns a transformation that reduces all gradients in one program, then applies `optimizer`, compiled.

    Every rank of the process set calls its `update` outside jit, at the same step. A BCOO leaf is sent as rows and
    indices, and is dense afterwards. With Adasum the updates of `optimizer` are combined, as in Horovod.

    Args:
        named_parameters: names and values of all leaves; checked, otherwise unused.
        backward_passes_per_step: calls summed on this rank before a reduction; calls in between return zero updates.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum, and multiplied after.
        num_groups, groups: must be omitted, since all gradients form one group.
        sparse_as_dense: True sends a sparse gradient as a dense one.
        process_set: the ranks that reduce; all other ranks update independently.
        average_aggregated_gradients: True divides by the passes, an option of Horovod for TensorFlow but not for torch.
    Raises: ValueError as Horovod does for the same arguments; HorovodInternalError if the gradients differ between
    ranks.
    """
    _check(backward_passes_per_step, op, gradient_predivide_factor, num_groups, groups)
    names = None if named_parameters is None else _names(named_parameters)
    transformation = optax.with_extra_args_support(optimizer)
    inner_update = jax.jit(transformation.update)
    reduce: Callable[[Any], Any] = lambda tree: _reduced(
        tree, compression, op, gradient_predivide_factor, sparse_as_dense, process_set
    )

    def init(params: Any) -> DistributedState:
        _check_names(names, params)
        sums = None if backward_passes_per_step == 1 else jax.tree.map(jnp.zeros_like, params)
        return DistributedState(transformation.init(params), np.zeros((), np.int32), sums)

    def update(gradients: Any, state: DistributedState, params: Any = None, **extra: Any) -> Any:
        ops.refuse_traced((gradients, state), "DistributedOptimizer.update")
        passes, sums = int(state.passes) + 1, state.sums
        if sums is not None:
            sums = jax.tree.map(jnp.add, sums, _dense(gradients))
            if passes < backward_passes_per_step:
                nothing = jax.tree.map(jnp.zeros_like, sums)
                return nothing, DistributedState(state.inner, np.asarray(passes, np.int32), sums)
            divisor = backward_passes_per_step if average_aggregated_gradients else 1
            gradients, sums = jax.tree.map(lambda g: g / divisor, sums), jax.tree.map(jnp.zeros_like, sums)
        if op != Adasum:
            gradients = reduce(gradients)
        updates, inner = inner_update(_dense(gradients), state.inner, params, **extra)
        if op == Adasum:
            updates = reduce(updates)
        return updates, DistributedState(inner, np.zeros((), np.int32), sums)

    return Distributed(init, update)


def _reduced(
    gradients: Any,
    compression: type[Compressor],
    op: ReduceOp,
    predivide: float,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> Any:
    """Reduces dense gradients together, and each sparse gradient by its rows."""
    if not process_set.included():
        return _dense(gradients)
    leaves, form = jax.tree.flatten(gradients, is_leaf=_is_sparse)
    leaves = [x.todense() if sparse_as_dense and _is_sparse(x) else x for x in leaves]
    rows = {
        i: sparse_allreduce_async(x, f"gradient.{i}", op, process_set) for i, x in enumerate(leaves) if _is_sparse(x)
    }
    if whole := [i for i in range(len(leaves)) if i not in rows]:
        names = ops.names_of(gradients, _is_sparse)
        options: dict[str, Any] = {"leaves": [names[i] for i in whole], "op": op, "process_set": process_set}
        if op == Average:
            options |= {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide}
        send = lambda arrays: synchronize(ops.grouped_allreduce_async(arrays, **options))
        for i, total in zip(whole, compressed(compression, send, [leaves[i] for i in whole]), strict=True):
            leaves[i] = total
    for i, handle in rows.items():
        leaves[i] = handle().todense()
    return jax.tree.unflatten(form, leaves)


def sparse_allreduce_async(
    tensor: sparse.BCOO, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], sparse.BCOO]:
    """Returns a function that returns the sum (hvd.Average: the mean) as a sparse array with the entries of all ranks;
    entries with equal indices are not summed. Wire: each rank's entries, to all others, `(N-1)` times the longest."""
    if op not in (ops.Sum, Average):
        raise NotImplementedError(
            f"a sparse allreduce with {op}: it gathers entries, which can be summed. Use hvd.Sum or hvd.Average."
        )
    of_values = ops.allgather_async(tensor.data, f"{name}.values", process_set)
    of_indices = ops.allgather_async(tensor.indices, f"{name}.indices", process_set)

    def wait() -> sparse.BCOO:
        values, indices = synchronize(of_values), synchronize(of_indices)
        if op == Average:
            values = values / jnp.asarray(process_set.size(), values.dtype)
        return sparse.BCOO((values, indices), shape=tensor.shape)

    return wait


def _dense(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.todense() if _is_sparse(x) else x, tree, is_leaf=_is_sparse)


def _names(named_parameters: Iterable[Any]) -> list[str]:
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), as params.items() gives.")
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    return names


def _check_names(names: Sequence[str] | None, params: Any) -> None:
    num_leaves = len(jax.tree.leaves(params))
    if names is not None and len(names) != num_leaves:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(names)} names for {num_leaves} leaves. Name all, or omit named_parameters."
        )


def _check(passes: int, op: ReduceOp, predivide: float, num_groups: int, groups: Any) -> None:
    """Raises ValueError for arguments that Horovod rejects, and for unsupported ones."""
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if op not in (Average, ops.Sum, Adasum):
        raise ValueError(f"op={op!r}: gradients are combined with hvd.Average, hvd.Sum or hvd.Adasum.")
    if num_groups or groups is not None:
        raise NotImplementedError(
            "hvd.DistributedOptimizer(groups=...): groups select gradients that are reduced together while others "
            "are still computed. Here all gradients exist when update is called, and are one group. Omit it."
        )


def _is_sparse(x: Any) -> bool:
    return isinstance(x, sparse.BCOO)
