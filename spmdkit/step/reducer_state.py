"""The reducer's state as part of the train state: its shapes and its shardings on a mesh.

    TrainState.reducer[call] = {leaf of the gradient: {name: [replicas of the leaf, *leaf]}}

A leaf's replicas are the replicas over which it is reduced; its sharded dims are also sharded in the state. With
`Reducer.per_shard_state` they are the positions along `replica`, and the other replica axes shard the leaf's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from spmdkit.communication.reducers.base import METRIC_PREFIX, ReducedLeaf, Reducer, inner_axes, value_bytes
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.mesh.layout import LeafPlacement
from spmdkit.mesh.mesh import describe_mesh, spec_axes
from spmdkit.step.lowering import part_shape, reducer_state_spec, replica_axes_of, shard_dim_of
from spmdkit.step.trace_context import Context


def check_effect(name: str, reducer: Reducer, context: Context, sizes: Mapping[str, int], what: str) -> None:
    """Raises ConfigError for a reducer without effect: no gradient is reduced over replicas, or the step never calls
    `sk.value_and_grad`. `sizes`: axis sizes of the full mesh; those of the context are of one group."""
    if reducer.is_sum:
        return
    assert context.sharding.placements is not None
    if not context.usage.has_called("value_and_grad"):
        raise ConfigError(
            f"reducer: {name} has no effect: {what} never calls sk.value_and_grad, which reduces gradients. The "
            "reducer is not used for jax.grad or sk.pmean(grads). Compute the gradient with "
            "sk.value_and_grad(loss_fn)(params, batch, state.key), or use reducer: sum."
        )
    specs = jax.tree.leaves(context.sharding.placements.gradient)
    if any(size > 1 for size in sizes.values()) and not any(replica_axes_of(context, spec) for spec in specs):
        zero = f", zero: {3 if 'fsdp' not in context.sharding.data_axes else 2}" if sizes["fsdp"] > 1 else ""
        raise ConfigError(
            f"reducer: {name} has no effect on the mesh {describe_mesh(sizes)}{zero}: no gradient is reduced over "
            "replicas, and the reducer is not used for communication of ZeRO and model axes. Try mesh: "
            f"{_with_replicas(sizes)}, or reducer: sum."
        )


class FirstStepValidator:
    """Validates, once, the reducer's metrics of the first step that uses it. Waits for that step."""

    def __init__(self, context: Context):
        self._validate, self._context = context.options.reducer.validate_first_step, context

    def __call__(self, metrics: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Validates the metrics of a step. `read` converts them to numbers over all groups.

        Raises:
            ConfigError: the reducer rejects the metrics.
        """
        if self._validate is not None and any(name.startswith(METRIC_PREFIX) for name in metrics):
            validate, self._validate = self._validate, None
            of_reducer = {name: x for name, x in read(metrics).items() if name.startswith(METRIC_PREFIX)}
            numbers = {name.removeprefix(METRIC_PREFIX): float(x) for name, x in of_reducer.items()}
            validate(reduced_leaves(self._context), numbers)


def reduced_leaves(context: Context) -> list[ReducedLeaf]:
    """Returns the leaves of the gradient that are reduced over replicas, in flattening order."""
    assert context.sharding.placements is not None
    sharding, leaves, itemsize = context.sharding, [], value_bytes(context.options.gradient_dtype or "float32")
    specs: list[Any] = jax.tree.leaves(context.sharding.placements.gradient)
    for (path, shape), spec in zip(context.sharding.placements.shapes.items(), specs, strict=True):
        if path in context.options.roles:
            continue
        if sizes := {a: sharding.size(a) for a in replica_axes_of(context, spec)}:
            axes = sharding.larger(spec_axes(spec))
            before = tuple(a for a in axes if a in sharding.data_axes)
            leaves.append(ReducedLeaf(path, part_shape(context, spec, shape), sizes, axes, before, itemsize))
    return leaves


def _with_replicas(sizes: Mapping[str, int]) -> str:
    """Returns a mesh in config syntax with `replica: 2` and half the size of its largest axis."""
    largest = max(sizes, key=lambda axis: sizes[axis])
    changed = {"replica": 2} | {a: n // 2 if a == largest else n for a, n in sizes.items() if a != "replica"}
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in changed.items() if size > 1) + "}"


def shapes(reducer: Reducer, gradients: Sequence[Any], context: Context) -> tuple[tuple[Any, ...], list[LeafPlacement]]:
    """Returns (abstract `TrainState.reducer`, the placement of its leaves) from the abstract gradient of each call of
    `sk.value_and_grad` and the context of the step in its form."""
    assert context.sharding.placements is not None
    entries, table = [], []
    for call, gradient in enumerate(gradients):
        specs = jax.tree.leaves(context.sharding.placements.of(gradient).gradient)
        states = []
        for (path, leaf), spec in zip(named_leaves(gradient), specs, strict=True):
            axes = replica_axes_of(context, spec)
            num, inner = context.sharding.size(*axes), context.sharding.size(*inner_axes(axes))
            found = reducer.init(leaf) if num > 1 else {}
            if reducer.per_shard_state and inner > 1:
                num, found = num // inner, {} if shard_dim_of(context, spec, leaf.shape) is None else found
            states.append({name: jax.ShapeDtypeStruct((num, *x.shape), x.dtype) for name, x in found.items()})
            for name, x in sorted(states[-1].items()):
                placed = reducer_state_spec(context, spec, x.shape[1:])
                name = f"reducer/{call}/{path}/{name}"
                table.append(LeafPlacement(name, x.shape, x.dtype, placed, "device", "reducer"))
        entries.append(jax.tree.unflatten(jax.tree.structure(gradient), states))
    return tuple(entries), table
