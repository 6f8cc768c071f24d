"""Looks whether training is finite: the loss at log steps, and now and then every leaf of the state, where a gradient that is not finite goes.

The state is looked at by a small program of its own, and not inside the step: there every leaf that is cut over devices would need one
more reduction in each step, and what is not finite stays in the state until it is looked at, at the latest before it is saved.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit.errors import NonFiniteError
from spmdkit.run.hooks.base import Action, Hook, Stop

LOOK_EVERY = 100
"""Steps between looks at the state, at least: one takes about half a millisecond of the host, 5 % of ten steps of 1 ms."""


def make(config: Any) -> Hook:
    """Returns the guard: `on_nonfinite` says whether it stops the run or tells."""
    stops = config.on_nonfinite == "stop"

    looked = [
        0
    ]  # the step after which the state was looked at last; after a restart, or a way back, it is looked at soon

    def after_step(run: Any, step: int, state: Any, metrics: Any) -> Action | None:
        if not run.is_log_step(step):
            return None
        finite = None
        if not 0 <= step - looked[0] < LOOK_EVERY:
            looked[0], finite = step, _look(run.program.mesh)(state)
        loss = run.numbers(step, metrics).get("loss", 0.0)
        if not math.isfinite(loss):
            what, whose = f"the loss is {loss}", "it"
        elif finite is not None and not finite:
            what = f"the state is not finite: '{run.program.non_finite_leaf(state)}'"
            whose = "the loss"
        else:
            return None
        if not stops:
            run.message(f"step {step}: {what}")
            return None
        before = run.last_logged
        return Stop(
            NonFiniteError.exit_code,
            f"{what} at step {step} ({whose} was {before.get('loss', 'not logged before')} at step {int(before.get('step', 0))}). Loss, "
            f"parameters and the optimizer's state have to be finite. {run.newest()} Lower the learning rate, set clip_norm, or look at the "
            "batches between those steps.",
            known=True,
        )

    return Hook("finite", order=10, after_step=after_step)


@functools.cache
def _look(mesh: Mesh) -> Any:
    """Returns the compiled `state -> bool[]`, the same on every device: whether no leaf holds a NaN or an infinity."""

    def finite(state: Any) -> jax.Array:
        leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
        # The largest of each column first, which XLA's CPU backend does in vectors: `isfinite(x).all()` took 30 times as long (1.4 against
        # 0.04 ms for 0.8 million numbers, 2 cores, 2026-11-22).
        columns = [jnp.isfinite(jnp.max(jnp.abs(jnp.atleast_1d(x)), axis=0)).all() for x in leaves]
        return functools.reduce(jnp.logical_and, columns, jnp.array(True))

    return jax.jit(finite, out_shardings=NamedSharding(mesh, PartitionSpec()))
