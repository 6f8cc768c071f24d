"""The mean over groups by a reducer: compressed communication between groups.

    x_g / G or x_g, this device's shard of each leaf -> reducer.apply over the groups' axes, manual over all mesh axes
    -> mean

Wire: the reducer's, over the axes along which the groups lie; each device sends its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from spmdkit.communication.reducers.base import ReduceGroup, Reducer
from spmdkit.foundation.trees import named_leaves
from spmdkit.step import rng, trace_context
from spmdkit.step.groups.groups import Groups


def mean_with_reducer(
    reducer: Reducer, groups: Groups, specs: Mapping[str, PartitionSpec], mesh: Mesh, key: jax.Array
) -> Any:
    """Returns `tree [groups, ...] -> tree [...]`, the mean over the groups, for trees like the parameters with None for
    leaves that are not sent.

    Args:
        specs: path of each parameter -> the spec of one copy.
        key: of the step.
    """

    def mean(tree: Any) -> Any:
        named = named_leaves(tree)
        cut = [specs[path] for path, _ in named]

        def body(leaves: list[jax.Array], key: jax.Array) -> list[jax.Array]:
            own = [x[0] / groups.num if reducer.input_scale == "weighted" else x[0] for x in leaves]
            over = ReduceGroup(groups.axes, groups.num, _made(key))
            total, _ = reducer.apply(own, [{} for _ in own], over)
            return [x / groups.num for x in total] if reducer.input_scale == "sum" else total

        each = [PartitionSpec(groups.axes, *spec) for spec in cut]
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(each, PartitionSpec()), out_specs=cut)
        with jax.named_scope(trace_context.REDUCE):
            found = mapped([x for _, x in named], key)
        return jax.tree.unflatten(jax.tree.structure(tree), found)

    return mean


def _made(key: jax.Array) -> Callable[[], jax.Array]:
    return lambda: rng.reducer_key(key)
