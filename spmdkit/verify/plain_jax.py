"""The loss and the gradient of plain JAX: `jax.value_and_grad` of the value that the user's loss returns, on one
device.

What every mesh is compared with is a program of spmdkit too. Here nothing of it takes part but the records that say
which examples a loss sees: no sums and counts that are differentiated apart, no accumulation, no compiled step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmdkit.program import compiler
from spmdkit.program.program import Program
from spmdkit.step import gradient, trace_context
from spmdkit.step.checks.return_values import checked_loss
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch
from spmdkit.verify.task_runner import Tree, flat
from spmdkit.verify.unpadded_reference import Unpadded


class Plain(NamedTuple):
    """The loss of one batch at the initial parameters, and its gradient by path."""

    loss: float
    gradient: Tree


def plain(program: Program | Unpadded, loss_fn: Callable[..., Any], state: TrainState, batch: Batch) -> Plain:
    """Returns what plain JAX makes of one batch, whose rows are in the order of a program without microbatches on one
    device."""
    num = jax.tree.leaves(batch.examples)[0].shape[0]
    examples = trace_context.Examples(num, batch.mask, jnp.arange(num, dtype=jnp.int32), state.key)

    def value(params: Any, rows: Any) -> jax.Array:
        given = (params, *((state.model_state,) if program.stateful else ()), rows, gradient._loss_key(state.key, 0, 0))
        with trace_context.with_examples(examples):
            loss, _, _ = checked_loss(loss_fn(*given), program.stateful)
        return loss.value

    def over_one_replica(params: Any) -> jax.Array:
        rows = jax.tree.map(lambda x: x[None, None], batch.examples)
        by_data = jax.vmap(value, (None, 0), axis_name="data")
        return jax.vmap(by_data, (None, 0), axis_name="replica")(params, rows)[0, 0]

    both = jax.jit(jax.value_and_grad(over_one_replica), compiler_options={**compiler.quick_options()})
    loss, grads = both(state.params)
    return Plain(float(loss), flat(grads))
