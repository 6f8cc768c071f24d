"""A per-replica step with its own name for the replicas, as the body of `jax.pmap(axis_name=)`, on every mesh.

The step runs as a `vmap` over the replicas: the state is not mapped, the rows are. A value that a collective has made
equal on all replicas is not mapped either, so JAX proves that the replicas agree. Parameters may be sharded over model
axes. With one replica the name has size one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import named_leaves
from spmdkit.step import trace_context
from spmdkit.step.checks.reductions import is_mean
from spmdkit.step.lowering import constrain
from spmdkit.step.model_state.dependence import Depends, Walk
from spmdkit.step.replica_collectives import reduced_twice
from spmdkit.step.trace_context import Context

_STATE, _ROWS = 1, 2
"""Bits of the inputs of a step: the state, and the rows of one replica."""

_SUMS = ("psum", "psum_invariant", "psum2")


def map_step(train_step: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Returns the step on global arrays from a step of one replica.

    Raises:
        ConfigError: a leaf of the new state or a metric differs between replicas, or a sum over the replicas has an
            operand that is equal on all of them.
    """

    @functools.wraps(train_step)
    def mapped(state: Any, batch: Any) -> Any:
        context = trace_context.current()
        num = context.sharding.num_replicas
        replicas = context.sharding.replica_axes

        def by_replica(x: jax.Array) -> jax.Array:
            rows = x.reshape(num, len(x) // num, *x.shape[1:])
            return constrain(context, rows, replicas, context.sharding.inner_axes)

        rows = jax.tree.map(by_replica, batch)
        one_replica = _checked_step(context, train_step, axis_name, state, jax.tree.map(lambda x: x[0], rows))
        return jax.vmap(one_replica, (None, 0), None, axis_name=axis_name, spmd_axis_name=replicas)(state, rows)

    return mapped


def _checked_step(
    context: Context, train_step: Any, axis_name: str, state: Any, rows: Any
) -> Callable[[Any, Any], Any]:
    """Returns the traced step of one replica; raises ConfigError as `map_step`."""
    num = context.sharding.num_replicas
    with compat.bound_axes({axis_name: num}):
        closed, out = jax.make_jaxpr(train_step, return_shape=True)(state, rows)
    walk = _Reductions(frozenset([axis_name]), _ROWS)
    bits = [_STATE] * len(jax.tree.leaves(state)) + [_ROWS] * len(jax.tree.leaves(rows))
    results = walk.run(closed.jaxpr, [Depends(x) for x in bits])
    for body in jaxprs.bodies(closed.jaxpr):
        for eqn in body.eqns:
            if id(eqn) in walk.of_equal and not is_mean(body, eqn.outvars[walk.of_equal[id(eqn)]], num):
                line = compat.user_line(eqn) or compat.source_line(eqn)
                raise ConfigError(reduced_twice("lax.psum", f"the operand at {line}"))
    for (path, _), var, depends in zip(named_leaves(out), closed.jaxpr.outvars, results, strict=True):
        if depends.all & _ROWS:
            index, _, name = path.partition("/")
            lines = (compat.user_line(eqn) for eqn in closed.jaxpr.eqns if var in eqn.outvars)
            at = next((f" ({line})" for line in lines if line), "")
            raise ConfigError(
                f"train_step: {'metric' if index == '1' else 'state leaf'} '{name}' differs between the replicas of "
                f"axis '{axis_name}'{at}: a reduction is missing. The results of a "
                "per-replica step must be the same on every replica. Apply "
                f"lax.pmean(..., '{axis_name}') to it, or to the gradients that it is computed from."
            )
    return jaxprs.function_of(closed, out)


@dataclass(frozen=True)
class _Reductions(Walk):
    """Attributes: of_equal: sums over the replicas of a value that is equal on all of them: id of the equation -> index
    of the operand."""

    of_equal: dict[int, int] = field(default_factory=dict)

    def results(self, eqn: Any, given: list[Depends]) -> list[Depends]:
        """Returns the dependences of an equation's results."""
        if eqn.primitive.name in _SUMS and self._covers(eqn):
            self.of_equal.pop(id(eqn), None)  # the carry of a loop may depend on more in a later pass
            equal = [i for i, depends in enumerate(given) if depends.all and not depends.all & self.per_replica]
            self.of_equal.update({id(eqn): i for i in equal})
        return super().results(eqn, given)
