"""Each gradient is applied `k` steps late: bounded, deterministic staleness.

    g_t = grad L(w_t)                              as in synchronous training, summed over all replicas
    w_{t+1} = w_t + update(g_{t-k}, w_t)           the first k steps do not change the parameters

It models a worker of an asynchronous parameter server that receives k updates from other workers between its pull and
its push, without randomness. The optimizer, including clipping, receives one late gradient per update. Its weight decay
and momentum act on the current parameters. A skipped step changes nothing, including the delay line.

Class: equal to synchronous training at `k: 0`, with the same program. Otherwise a different method, which converges for
learning rates that decrease with k.
Use it to measure the cost of staleness for a task. It is not faster: every step still reduces its gradient.
Memory: k gradients in the dtype of the parameters, sharded like the optimizer's state. Wire: that of `every_step`.
Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (2013), with its
bound met exactly; Zinkevich et al., "Slow learners are fast" (2009), delayed SGD, algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmdkit.communication.options import check_option, is_whole
from spmdkit.communication.sync.base import Sync
from spmdkit.errors import ConfigError


class DelayLineState(NamedTuple):
    """The state of an optimizer with delayed gradients.

    Attributes:
        optimizer: the state of the wrapped optimizer.
        delay_line: k pending gradients, newest first.
        waiting: int32[], number of pending gradients: 0 before the first step, k from the k-th step on.
    """

    optimizer: Any
    delay_line: tuple[Any, ...]
    waiting: jax.Array


def make(k: int) -> Sync:
    """Returns the sync."""
    check_option(is_whole(k, 0), "stale.k", k, "It is the number of steps that a gradient is late. Write k: 2.")
    return Sync(
        every=None,
        optimizer=(lambda tx: delay_gradients(tx, k)) if k else None,
        description=f"each gradient {k} steps late",
    )


def delay_gradients(tx: optax.GradientTransformation, k: int) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with its gradients delayed by `k` steps."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> DelayLineState:
        line = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(k))
        return DelayLineState(tx.init(params), line, jnp.zeros((), jnp.int32))

    def update(grads: Any, state: DelayLineState, params: Any = None, **extra: Any) -> tuple[Any, DelayLineState]:
        due = state.delay_line[-1]
        if "grad" in extra:
            extra["grad"] = due
        if "value_fn" in extra:
            extra["value_fn"] = _refuse_value_optimizer
        updates, new_state = tx.update(due, state.optimizer, params, **extra)
        is_full = state.waiting == k
        new_state = jax.tree.map(lambda new, old: jnp.where(is_full, new, old), new_state, state.optimizer)
        updates = jax.tree.map(lambda u: jnp.where(is_full, u, jnp.zeros_like(u)), updates)
        line = (grads, *state.delay_line[:-1])
        return updates, DelayLineState(new_state, line, jnp.minimum(state.waiting + 1, k))

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_value_optimizer(params: Any) -> Any:
    raise ConfigError(
        "sync: stale with an optimizer that evaluates the loss itself (a line search): it would combine a gradient "
        "of older parameters with the loss of the current batch. Use an optimizer that uses the gradient alone, or "
        "sync: every_step."
    )
