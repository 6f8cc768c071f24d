"""The reducer's state as part of the train state: its shapes and shardings on a mesh.

    TrainState.reducer[call] = {leaf of the gradient: {name: [replicas of the leaf, *leaf]}}

A leaf's replicas are those over which it is reduced. Dims that are sharded (`fsdp`, `tensor`) are sharded in the state
too. For a reducer with `Reducer.per_shard_state` the replicas are the positions along `replica`, and the other replica
axes shard the leaf's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdkit.communication.reducers.base import METRIC_PREFIX, ReducedLeaf, Reducer, inner_axes, value_bytes
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.mesh.layout import LeafPlacement
from spmdkit.mesh.mesh import describe_mesh, spec_axes
from spmdkit.step import trace_context
from spmdkit.step.lowering import part_shape, reducer_state_spec, replica_axes_of, shard_dim_of


def check_effect(
    name: str, reducer: Reducer, context: trace_context.Context, sizes: Mapping[str, int], what: str
) -> None:
    """Rejects a reducer without effect on this mesh or in this step.

    Args:
        sizes: of the whole mesh; the context's are those of one group if groups train separately.

    Raises:
        ConfigError: there are several devices and one replica, ZeRO 2 shards every gradient, or the step never calls
            `sk.value_and_grad`.
    """
    if reducer.is_sum:
        return
    assert context.sharding.placements is not None
    if not context.usage.has_called("value_and_grad"):
        raise ConfigError(
            f"reducer: {name} has no effect: {what} never calls sk.value_and_grad, which reduces gradients. The "
            "reducer is not used for jax.grad or sk.pmean(grads). Compute the gradient with "
            "sk.value_and_grad(loss_fn)(params, batch, state.key), or use reducer: sum."
        )
    several = any(size > 1 for size in sizes.values())
    if several and not any(
        replica_axes_of(context, spec) for spec in jax.tree.leaves(context.sharding.placements.gradient)
    ):
        zero = f", zero: {3 if 'fsdp' not in context.sharding.data_axes else 2}" if sizes["fsdp"] > 1 else ""
        raise ConfigError(
            f"reducer: {name} has no effect on the mesh {describe_mesh(sizes)}{zero}: no gradient is reduced over "
            "replicas, and the reducer is not used for communication of ZeRO and model axes. Try mesh: "
            f"{_with_replicas(sizes)}, or reducer: sum."
        )


def check_leaves(reducer: Reducer, context: trace_context.Context) -> None:
    """Runs the reducer's check on the leaves that it is to reduce.

    Raises:
        ConfigError: it cannot reduce them.
    """
    if found := reduced_leaves(context):
        reducer.check(found)


class FirstStepValidator:
    """Validates, once, the reducer's metrics of the first step that uses it. Waits for that step."""

    def __init__(self, context: trace_context.Context):
        self._look, self._context = context.options.reducer.validate_first_step, context

    def __call__(self, metrics: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Validates the metrics of a step; `read` converts them to numbers over all groups.

        Raises:
            ConfigError: they show a mistake.
        """
        if self._look is not None and any(name.startswith(METRIC_PREFIX) for name in metrics):
            look, self._look = self._look, None
            numbers = {name: x for name, x in read(metrics).items() if name.startswith(METRIC_PREFIX)}
            look(
                reduced_leaves(self._context),
                {name.removeprefix(METRIC_PREFIX): float(x) for name, x in numbers.items()},
            )


def reduced_leaves(context: trace_context.Context) -> list[ReducedLeaf]:
    """Returns the leaves of the gradient that are reduced over replicas, in flattening order."""
    assert context.sharding.placements is not None
    found, each = [], value_bytes(context.options.reduce_dtype or "float32")
    specs: list[Any] = jax.tree.leaves(context.sharding.placements.gradient)
    for (path, shape), spec in zip(context.sharding.placements.shapes.items(), specs, strict=True):
        sizes = {a: context.sharding.size(a) for a in replica_axes_of(context, spec)}
        names = spec_axes(spec)
        if sizes:
            cut = tuple(a for a in names if context.sharding.size(a) > 1)
            before = tuple(a for a in cut if a in context.sharding.data_axes)
            found.append(ReducedLeaf(path, part_shape(context, spec, shape), sizes, cut, before, each))
    return found


def _with_replicas(sizes: Mapping[str, int]) -> str:
    """Returns a mesh in config syntax, with two replicas taken from its largest axis."""
    largest = max(sizes, key=lambda axis: sizes[axis])
    changed = {"replica": 2} | {a: n // 2 if a == largest else n for a, n in sizes.items() if a != "replica"}
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in changed.items() if size > 1) + "}"


def shapes(
    reducer: Reducer, gradients: Sequence[Any], context: trace_context.Context
) -> tuple[tuple[Any, ...], list[LeafPlacement]]:
    """Returns (`TrainState.reducer` as `jax.ShapeDtypeStruct`, the placement of its leaves).

    Args:
        gradients: the gradient of each call of `sk.value_and_grad`, abstract.
        context: of the step, in its form.
    """
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
            table += [
                LeafPlacement(
                    f"reducer/{call}/{path}/{name}",
                    x.shape,
                    x.dtype,
                    reducer_state_spec(context, spec, x.shape[1:]),
                    "device",
                    "reducer",
                )
                for name, x in sorted(states[-1].items())
            ]
        entries.append(jax.tree.unflatten(jax.tree.structure(gradient), states))
    return tuple(entries), table


def zero_state(state: Any) -> Any:
    """Returns the state before the first step."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
