"""Where JAX's types have added up a derivative over devices: sums that the typed trace of a function has, and the untyped one has not.

Inside `shard_map` with `check_vma` a value that is the same along an axis is cast where it meets one that differs, and the transpose of
that cast is a sum over the axis. For a parameter and a loss over all devices' examples that is right. A derivative *inside* the function
with respect to a constant (`jax.grad(f)(0.0)`) gets the same sum, without a word, and with it the other devices' derivatives. Traced
without the types (`check_vma=False`) the function has its own sums only.

Sums are told apart by the place in the source that made them: without types the transpose of a user's own sum is one more sum, at the
same place, so that a place can have fewer sums in the typed trace but never more.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from spmdkit import compat, jaxprs
from spmdkit.errors import ConfigError
from spmdkit.step import scope


def summed_by_types(typed: ClosedJaxpr, untyped: ClosedJaxpr, axes: Collection[str]) -> str | None:
    """Returns the source line of the first sum over any of `axes` that only the types have put there, or None.

    Args:
        typed: the trace of a function in a `shard_map` with `check_vma`.
        untyped: that of the same function without.
    """
    known = collections.Counter(_sums(untyped.jaxpr, axes))
    for line in _sums(typed.jaxpr, axes):
        known[line] -= 1
        if known[line] < 0:
            return line
    return None


def refuse_summed(what: str, typed: ClosedJaxpr, untyped: ClosedJaxpr, axes: Collection[str]) -> None:
    """Refuses a function that JAX's types change: `what` is its name.

    Raises:
        ConfigError: it takes a derivative with respect to a value that is the same along one of `axes`.
    """
    if (line := summed_by_types(typed, untyped, axes)) is not None:
        raise ConfigError(
            f"{what} takes a derivative with respect to a value that is the same along {sorted(axes)}, at {line}. JAX adds such a derivative "
            "up over those devices, so each would get that of all devices' examples. Differentiate with respect to something of the "
            "shard's own: `x * 0` instead of a constant or `jnp.zeros(...)`, `jax.lax.pcast(w, axes, to='varying')` instead of `w`."
        )


def traced(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, shapes: Sequence[Any], typed: bool) -> ClosedJaxpr:
    """Returns the trace of `fn` on the shards of arrays of these shapes, with types or without; of its results nothing is asked."""

    def probe(*shards: jax.Array) -> jax.Array:
        fn(*shards)
        return jnp.zeros(())

    mapped = jax.shard_map(probe, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=typed)
    with compat.outside_of_spmd_vmaps():
        return jax.make_jaxpr(mapped)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes))


def takes_derivative(closed: ClosedJaxpr) -> bool:
    """Returns whether anything in a trace is the transpose of something: only there do the types add up."""
    return any("transpose(" in str(eqn.source_info.name_stack) for eqn in jaxprs.equations(closed))


def _sums(jaxpr: Any, axes: Collection[str]) -> Iterator[str]:
    """Yields the source line of every sum over any of `axes`, once for each array that it adds up; not those of reducers, which are no
    derivatives, and of which there are fewer without types: the sum of a constant is a constant there."""
    for eqn, (line, is_reducers) in jaxprs.equations_within(jaxpr, ("", False), _place):
        adds = eqn.primitive.name.startswith("psum") and set(eqn.params.get("axes", ())) & set(axes)
        if adds and not is_reducers:
            yield from [line] * len(eqn.invars)


def _place(eqn: Any, around: tuple[str, bool]) -> tuple[tuple[str, bool], tuple[str, bool]]:
    """Returns an equation's line (inside of a function that JAX has jitted, that of the call where there is no other) and whether it is a
    reducer's, for itself and for what is around those inside of it."""
    line, is_reducers = around
    here = (compat.source_line(eqn) or line, is_reducers or scope.REDUCE in str(eqn.source_info.name_stack))
    return here, here
