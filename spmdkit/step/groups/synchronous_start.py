"""The synchronous step of all replicas on a train state with one copy per group, before groups train separately.

    one of the equal copies -> the step of the whole mesh -> its state for each group

Each device uses its shard of its own group's copy as the global state, and returns the new state in the same way: no
data move. The equality of the copies is not checked here. They are equal at the start and after each such step, since
its results are the same everywhere.

Wire: that of the step of the whole mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.step.groups.groups import GROUPED, Groups
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch, Stepped


def synchronous_step(
    whole: Callable[[TrainState, Batch], Stepped], groups: Groups, single: TrainState, code: Any
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function to compile.

    Args:
        whole: the step of the whole mesh; it takes and returns a state of one copy, on the devices.
        single: that state, abstract, with its shardings.
        code: the guard's code in a step of groups, abstract, or None.
    """
    fields = {name: getattr(single, name) for name in GROUPED}
    mesh = jax.tree.leaves(single.params)[0].sharding.mesh
    one = jax.tree.map(lambda x: x.sharding.spec, fields)
    each = jax.tree.map(lambda x: PartitionSpec(groups.axes, *x.sharding.spec), fields)
    over = functools.partial(
        jax.shard_map, mesh=mesh, check_vma=False
    )  # copies are bitwise equal, but typed as varying
    local_copy = over(lambda tree: jax.tree.map(lambda x: x[0], tree), in_specs=(each,), out_specs=one)
    group_copies = over(lambda tree: jax.tree.map(lambda x: x[None], tree), in_specs=(one,), out_specs=each)

    def train_step(state: TrainState, batch: Batch) -> Stepped:
        copy = local_copy({name: getattr(state, name) for name in GROUPED})
        new, metrics, found = whole(state.replace(**copy, sync=None), batch)
        sync_state = groups.sync.init(new.params)  # the sync's state after the last synchronous step
        new = new.replace(**group_copies({name: getattr(new, name) for name in GROUPED}), sync=sync_state)
        if found is not None and code is not None:
            cut = PartitionSpec(groups.axes, *[PartitionSpec.UNCONSTRAINED] * (code.ndim - 1))
            found = lax.with_sharding_constraint(jnp.broadcast_to(found, code.shape), NamedSharding(mesh, cut))
        return new, metrics, found

    return train_step
