"""Groups of replicas that train separately and synchronize at intervals: the train state with one copy per group, and
the communication between groups.

A group's step is the step of the mesh without the sync's axes (step.py). The sync (sync/) determines when groups
synchronize.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.communication.reducers.base import Reducer
from spmdkit.communication.sync.base import Mean, Sync
from spmdkit.errors import ConfigError
from spmdkit.foundation.jaxprs import equations
from spmdkit.foundation.trees import common_dtype
from spmdkit.step import trace_context
from spmdkit.step.metrics.base import Metric, reduce_parts
from spmdkit.step.model_state import agreement as model_state_agreement
from spmdkit.step.state import TrainState

GROUPED = ("params", "opt_state", "model_state", "ema")
"""The fields of a train state with one copy per group: leaves [groups, ...]."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a program.

    Attributes:
        axes: the mesh axes along which they lie.
        num: number of groups.
        sync: when they synchronize.
        reducer: for the communication between groups; None: an exact mean.
    """

    axes: tuple[str, ...]
    num: int
    sync: Sync
    reducer: Reducer | None = None

    def inner(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the mesh of one group."""
        return dict(sizes) | dict.fromkeys(self.axes, 1)


def check_alone(groups: Groups, jaxpr: Any, what: str) -> None:
    """Rejects a step in which the user's code communicates between groups.

    Raises:
        ConfigError: a collective names one of the groups' axes.
    """
    for eqn in equations(jaxpr):
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, tuple | list) else ()
        if set(names) & set(groups.axes) and eqn.primitive.name not in ("axis_index", "pvary", "pcast"):
            raise ConfigError(
                f"{what}: {eqn.primitive.name} over {groups.axes[0]} at {compat.source_line(eqn)}: with this sync the "
                f"groups along {groups.axes[0]} train separately, and do not communicate in a step. Remove it, or use "
                "sync: every_step."
            )


# ---- the train state


def stack_state(groups: Groups, state: TrainState) -> TrainState:
    """Returns the train state of all groups from that of one: a copy for each."""
    copies = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (groups.num, *x.shape)), tree)
    own = {name: copies(getattr(state, name)) for name in GROUPED}
    return state.replace(**own, sync=groups.sync.init(state.params))


# ---- communication


def mean(tree: Any) -> Any:
    """Returns [...] from [groups, ...]: the mean of floats, in float32 or wider, and the first of everything else."""

    def leaf_mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        return x.astype(common_dtype(x.dtype, jnp.float32)).mean(0).astype(x.dtype)

    return jax.tree.map(leaf_mean, tree)


def agreement_fn(sync: Sync, turn: int) -> Callable[[Any, Any, Mean], tuple[Any, Any]]:
    """Returns `(params, state, mean) -> (params, state)` of a program in which groups synchronize."""
    assert sync.agree is not None
    return functools.partial(sync.agree, turn=turn) if sync.schedule else sync.agree


def agreed_state(groups: Groups, state: TrainState, turn: int, mean: Mean) -> TrainState:
    """Returns the state after a program in which groups synchronize; `mean` is over the groups."""
    with jax.named_scope(trace_context.SYNC):
        params, sync_state = agreement_fn(groups.sync, turn)(state.params, state.sync, mean)
    same = jax.tree.map(lambda x, p: jnp.broadcast_to(x, p.shape).astype(p.dtype), params, state.params)
    return state.replace(params=same, sync=sync_state)


def merged_state(groups: Groups, state: TrainState, declared: model_state_agreement.Kinds) -> TrainState:
    """Returns the one copy of the state that is evaluated and exported.

    Args:
        declared: the task's declared reductions of leaves of the model state.
    """
    assert groups.sync.view is not None
    return state.replace(
        params=groups.sync.view(state.params, state.sync, mean),
        opt_state=mean(state.opt_state),
        model_state=model_state_agreement.merge_groups(declared, state.model_state),
        ema=mean(state.ema),
    )


def merged_metrics(metrics: Mapping[str, Metric]) -> dict[str, jax.Array]:
    """Returns the metrics over all groups from those of each, [groups, ...]."""
    add, largest = (
        functools.partial(jax.tree.map, over) for over in (lambda x: x.sum(0).astype(x.dtype), lambda x: x.max(0))
    )
    return {name: metric.value for name, metric in reduce_parts(dict(metrics), add, largest, lambda x: x).items()}


def regroup_state(
    state: TrainState, had_groups: bool, groups: Groups | None, declared: model_state_agreement.Kinds
) -> TrainState:
    """Returns the state for these groups (None: synchronous replicas) from that of another number of groups.

    The mean of the old groups, for any sync, is copied to each new group. The state of the sync is initialized again.
    """
    if had_groups:
        fields = {name: mean(getattr(state, name)) for name in ("params", "opt_state", "ema")}
        state = state.replace(**fields, model_state=model_state_agreement.merge_groups(declared, state.model_state))
    return state if groups is None else stack_state(groups, state)
