"""Detects sums over replicas of values that are already the same on all replicas, in a per-replica step.

In such a step the user's code runs inside `shard_map` and contains the reductions, as with Horovod and pmap. In plain
JAX a second reduction makes gradients N times too large without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax.extend

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step.replica_collectives import reduced_twice


def check_reductions(jaxpr: jax.extend.core.ClosedJaxpr, axes: Collection[str] = REPLICA_AXES) -> None:
    """Raises ConfigError, with the user's source line, for a sum of a value that is already the same on every replica.

    JAX silently casts such an operand to varying and multiplies it by N: the pattern `pvary` followed by `psum`. Sums
    of constants, as in `lax.psum(1, axis)` to count replicas, are accepted, and so are means (`lax.pmean`): sums that
    are divided by N. `axes`: replica axes larger than one.
    """
    for body, sizes in _bodies(jaxpr):
        depends: set[Any] = set(body.invars)
        cast: set[Any] = set()
        for eqn in body.eqns:
            inputs = [v for v in eqn.invars if isinstance(v, jax.extend.core.Var)]
            if any(v in depends for v in inputs):
                depends.update(eqn.outvars)
            name, is_over = eqn.primitive.name, bool(jaxprs.axis_names(eqn) & set(axes))
            if name in ("pvary", "pcast") and is_over and inputs and inputs[0] in depends:
                cast.update(eqn.outvars)
            if name in ("psum_invariant", "psum", "psum2") and is_over:
                num = math.prod(sizes[axis] for axis in jaxprs.axis_names(eqn))
                for operand, total in zip(eqn.invars, eqn.outvars, strict=True):
                    if isinstance(operand, jax.extend.core.Var) and operand in cast and not is_mean(body, total, num):
                        raise ConfigError(reduced_twice("lax.psum", f"the operand at {compat.source_line(eqn)}"))


def is_mean(body: Any, total: Any, num: int) -> bool:
    """Returns whether a sum of `num` terms is only used divided by `num`, as in `lax.pmean`."""
    uses = [eqn for eqn in body.eqns if any(v is total for v in eqn.invars)]
    if any(v is total for v in body.outvars):
        return False
    for eqn in uses:
        if eqn.primitive.name == "convert_element_type":
            if not is_mean(body, eqn.outvars[0], num):
                return False
        elif eqn.primitive.name != "div" or eqn.invars[0] is not total or getattr(eqn.invars[1], "val", None) != num:
            return False
    return bool(uses)


def _bodies(jaxpr: Any) -> Iterator[tuple[Any, Mapping[str, int]]]:
    """Yields the bodies of the shard_maps in a jaxpr, and every jaxpr nested in them, with the sizes of the axes."""
    is_map: Callable[[Any], bool] = lambda eqn: eqn.primitive.name == "shard_map"
    for eqn in jaxprs.equations(jaxpr, into=lambda eqn: not is_map(eqn)):
        if is_map(eqn):
            for inner in jaxprs.inner_jaxprs(eqn):
                for body in jaxprs.bodies(inner):
                    yield body, eqn.params["mesh"].shape
