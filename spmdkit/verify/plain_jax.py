"""The loss and the gradient of plain JAX: `jax.value_and_grad` of the value that the user's loss returns, on one
device.

The reference of every mesh is a spmdkit program too. This one uses nothing of spmdkit but the record of the examples
that a loss sees: no separate gradients of sums and counts, no accumulation, no compiled step.
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


class PlainResult(NamedTuple):
    """The loss of one batch at the initial parameters, and its gradient by path."""

    loss: float
    gradient: Tree


def plain_value_and_grad(
    program: Program | Unpadded, loss_fn: Callable[..., Any], state: TrainState, batch: Batch
) -> PlainResult:
    """Returns the plain JAX result of one batch, with rows in the order of a one-device program without
    microbatches."""
    num = jax.tree.leaves(batch.examples)[0].shape[0]
    examples = trace_context.Examples(num, batch.mask, jnp.arange(num, dtype=jnp.int32), state.key)

    def value(params: Any, rows: Any) -> jax.Array:
        arguments = (
            params,
            *((state.model_state,) if program.stateful else ()),
            rows,
            gradient._loss_key(state.key, 0, 0),
        )
        with trace_context.with_examples(examples):
            loss, _, _ = checked_loss(loss_fn(*arguments), program.stateful)
        return loss.value

    def over_one_replica(params: Any) -> jax.Array:
        rows = jax.tree.map(lambda x: x[None, None], batch.examples)
        by_data = jax.vmap(value, (None, 0), axis_name="data")
        return jax.vmap(by_data, (None, 0), axis_name="replica")(params, rows)[0, 0]

    both = jax.jit(jax.value_and_grad(over_one_replica), compiler_options={**compiler.quick_options()})
    loss, grads = both(state.params)
    return PlainResult(float(loss), flat(grads))
