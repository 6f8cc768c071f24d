"""Shows that the results of a per-replica step are the same on every replica.

JAX's types show it for what a reduction returns. The parameters of such a step are typed as varying (`ReplicaCopy`),
and so is all that a step computes from them: `jnp.where(is_finite, new.params, state.params)`, a norm of the
parameters, a gradient plus a multiple of the parameters. The types also omit what a branch or a loop depends on
(jax 0.10.2). `require_same` marks a result in the trace, and `check_agreement` follows the marked values back to the
rows of a replica, or to values that are equal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import trace_context
from spmdkit.step.model_state.dependence import Depends, Walk


def require_same(context: trace_context.Context, x: Any, what: str, rule: str) -> Any:
    """Returns `x` typed as the same on every replica. `check_agreement` raises ConfigError if it may differ.

    Args:
        what, rule: parts of the error, before and after the axes over which `x` differs.
    """
    is_typed = context.inside and compat.axes_are_typed() and context.sharding.larger(REPLICA_AXES)
    return compat.typed_as_same(x, what, rule) if is_typed else x


def check_agreement(jaxpr: jax.extend.core.ClosedJaxpr, axes: Collection[str]) -> None:
    """Raises ConfigError for a value of `require_same` that may differ between replicas. `axes`: the replica axes
    larger than one."""
    walk = _Agreement(frozenset(axes), (1 << 2 * len(axes)) - 1, tuple(axes))
    walk.run(jaxpr.jaxpr, [Depends()] * len(jaxpr.jaxpr.invars))
    if walk.differing:
        raise ConfigError(walk.differing[0])


@dataclass(frozen=True)
class _Agreement(Walk):
    """The replica axes over which values differ: bit i of axis i for values, which the types limit, and bit i + n for
    values that a branch or a loop selected by a value that differs, which only a reduction clears.

    Attributes: differing: messages of the marked values that differ.
    """

    names: tuple[str, ...]
    differing: list[str] = field(default_factory=list)

    def results(self, eqn: Any, given: list[Depends]) -> list[Depends]:
        """Returns the dependences of an equation's results."""
        name, num = eqn.primitive.name, len(self.names)
        if name == "shard_map":
            (body,) = jaxprs.inner_jaxprs(eqn)
            self.run(body, [Depends(0, self._typed(var)) for var in body.invars])
            return [Depends()] * len(eqn.outvars)
        if name == compat.TYPED_AS_SAME:
            if bits := given[0].all | given[0].all >> num:
                axes = sorted(axis for i, axis in enumerate(self.names) if bits >> i & 1)
                what, rule = eqn.params["what"], eqn.params["rule"]
                self.differing.append(f"{what} differs between the replicas of axes {axes}: {rule}")
            return [Depends()]
        typed = [self._typed(var) for var in eqn.outvars]
        if name == "axis_index":
            return [Depends(0, bits) for bits in typed]
        found = [depends.all for depends in super().results(eqn, given)]
        values = (1 << num) - 1
        if name in ("cond", "while"):
            found = [bits | (bits & values & ~limit) << num for bits, limit in zip(found, typed, strict=True)]
        return [Depends(0, bits & (limit | ~values)) for bits, limit in zip(found, typed, strict=True)]

    def _typed(self, var: Any) -> int:
        varying = compat.varying_axes_of(var.aval)
        return sum(1 << i for i, name in enumerate(self.names) if name in varying)
