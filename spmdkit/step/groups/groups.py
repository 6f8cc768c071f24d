"""Groups of replicas that train separately and synchronize at intervals: the train state with one copy per group, and
the communication between groups.

The step of a group is the step of the mesh without the sync's axes (step.py). The sync (sync/) determines when groups
synchronize.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from spmdkit import compat
from spmdkit.communication.reducers.base import ReduceGroup, Reducer
from spmdkit.communication.sync.base import Mean, Sync
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import common_dtype, is_wide_float, named_leaves, path_name
from spmdkit.step import leaf_roles, rng, trace_context
from spmdkit.step.metrics.base import Metric, reduce_parts
from spmdkit.step.model_state import agreement as model_state_agreement
from spmdkit.step.state import TrainState

GROUPED = ("params", "opt_state", "model_state", "ema")
"""The train state fields with one copy per group: leaves [groups, ...]."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a program: `num` groups along the mesh axes `axes`. They synchronize by `sync`; `reducer` averages
    over them (None: an exact mean). Parameters with paths in `frozen` are equal in all groups and are not sent."""

    axes: tuple[str, ...]
    num: int
    sync: Sync
    reducer: Reducer | None = None
    frozen: frozenset[str] = frozenset()

    def sent(self, params: Any) -> Any:
        """Returns the parameters, of one group or of all, with None in place of the frozen ones."""
        return leaf_roles.select(params, lambda path: path not in self.frozen)

    def inner(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the axis sizes of the mesh of one group."""
        return dict(sizes) | dict.fromkeys(self.axes, 1)


def check_alone(groups: Groups, jaxpr: Any, what: str) -> None:
    """Raises ConfigError if the user's step communicates between groups."""
    for eqn in jaxprs.equations(jaxpr):
        if jaxprs.axis_names(eqn) & set(groups.axes) and eqn.primitive.name not in ("axis_index", "pvary", "pcast"):
            raise ConfigError(
                f"{what}: {eqn.primitive.name} over {groups.axes[0]} at {compat.source_line(eqn)}: with this sync the "
                f"groups along {groups.axes[0]} train separately, and do not communicate in a step. Remove it, or use "
                "sync: every_step."
            )


# ---- the train state


def stack_state(groups: Groups, state: TrainState) -> TrainState:
    """Returns the train state of all groups from the state of one group: one copy per group."""
    copies: Callable[[Any], Any] = lambda tree: jax.tree.map(
        lambda x: jnp.broadcast_to(x, (groups.num, *x.shape)), tree
    )
    own = {name: copies(getattr(state, name)) for name in GROUPED}
    return state.replace(**own, sync=groups.sync.init(groups.sent(state.params)))


# ---- communication


def mean(tree: Any) -> Any:
    """Returns [...] from [groups, ...]: the mean of floats, computed in float32 or wider; otherwise the first entry."""

    wide: Callable[[jax.Array], jax.Array] = lambda x: x.astype(common_dtype(x.dtype, jnp.float32))
    first_or_mean = lambda x: wide(x).mean(0).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]
    return jax.tree.map(first_or_mean, tree)


def mean_with_reducer(
    reducer: Reducer, groups: Groups, specs: Mapping[str, PartitionSpec], mesh: Mesh, key: jax.Array
) -> Any:
    """Returns `tree [groups, ...] -> tree [...]`, the mean over groups by a reducer. Trees are like the parameters,
    with None for leaves that are not sent. `specs`: parameter path -> spec of one copy; `key`: the key of the step.

    Wire: the reducer's, over the axes of the groups; each device sends its shard.
    """

    def mean(tree: Any) -> Any:
        named = [(path, x) for path, x in named_leaves(tree) if is_wide_float(x.dtype)]
        out_specs = [specs[path] for path, _ in named]

        def body(leaves: list[jax.Array], key: jax.Array) -> list[jax.Array]:
            local = [x[0] / groups.num if reducer.input_scale == "weighted" else x[0] for x in leaves]
            group = ReduceGroup(groups.axes, groups.num, lambda: rng.reducer_key(key))
            total, _ = reducer.apply(local, [{} for _ in local], group)
            return [x / groups.num for x in total] if reducer.input_scale == "sum" else total

        in_specs = [PartitionSpec(groups.axes, *spec) for spec in out_specs]
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(in_specs, PartitionSpec()), out_specs=out_specs)
        with jax.named_scope(trace_context.REDUCE):
            averages = dict(zip([path for path, _ in named], mapped([x for _, x in named], key), strict=True))
        return jax.tree.map_with_path(lambda path, x: averages.get(path_name(path), x[0]), tree)

    return mean


def agreement_fn(sync: Sync, turn: int) -> Callable[[Any, Any, Mean], tuple[Any, Any]]:
    """Returns the `(params, state, mean) -> (params, state)` with which groups synchronize."""
    assert sync.agree is not None
    return functools.partial(sync.agree, turn=turn) if sync.schedule else sync.agree


def agreed_state(groups: Groups, state: TrainState, turn: int, mean: Mean) -> TrainState:
    """Returns the state after groups synchronize; `mean` averages over the groups."""
    with jax.named_scope(trace_context.SYNC):
        sent, sync_state = agreement_fn(groups.sync, turn)(groups.sent(state.params), state.sync, mean)
    params = leaf_roles.fill(sent, state.params)
    same = jax.tree.map(
        lambda x, p: jnp.broadcast_to(x, p.shape).astype(p.dtype) if is_wide_float(p.dtype) else p, params, state.params
    )
    return state.replace(params=same, sync=sync_state)


def merged_state(groups: Groups, state: TrainState, declared: model_state_agreement.Kinds) -> TrainState:
    """Returns the single copy of the state to evaluate and export. `declared`: the task's state reductions."""
    assert groups.sync.view is not None
    first = jax.tree.map(lambda x: x[0], state.params)
    return state.replace(
        params=leaf_roles.fill(groups.sync.view(groups.sent(state.params), state.sync, mean), first),
        opt_state=mean(state.opt_state),
        model_state=model_state_agreement.merge_groups(declared, state.model_state),
        ema=mean(state.ema),
    )


def merged_metrics(metrics: Mapping[str, Metric]) -> dict[str, jax.Array]:
    """Returns the metrics over all groups from the metrics of each group, [groups, ...]."""
    add = functools.partial(jax.tree.map, lambda x: x.sum(0).astype(x.dtype))
    largest = functools.partial(jax.tree.map, lambda x: x.max(0))
    return {name: metric.value for name, metric in reduce_parts(dict(metrics), add, largest, lambda x: x).items()}


def regroup_state(
    state: TrainState, had_groups: bool, groups: Groups | None, declared: model_state_agreement.Kinds
) -> TrainState:
    """Returns the state for these groups (None: synchronous replicas) from a state with another number of groups.

    For any sync, every new group receives the mean of the old groups. The sync's state is initialized again.
    """
    if had_groups:
        fields = {name: mean(getattr(state, name)) for name in ("params", "opt_state", "ema")}
        state = state.replace(**fields, model_state=model_state_agreement.merge_groups(declared, state.model_state))
    return state if groups is None else stack_state(groups, state)
