"""Detects derivatives that JAX's types implicitly sum over devices: sums that occur in the typed trace of a function
but not in the untyped trace.

Inside `shard_map` with `check_vma`, an invariant value is cast where it meets a varying value. The transpose of that
cast is a sum over the axis. A derivative *inside* the function with respect to a constant (`jax.grad(f)(0.0)`) then
silently includes the derivatives of other devices. Without types (`check_vma=False`) only the user's sums remain.

Some additional sums of the typed trace are correct: with types the transpose of a user's sum is a cast, and its
cotangents are summed where the result of the sum met varying values. The use of a sum distinguishes them. A sum that
feeds a cast at the source line of a user's sum is half of that sum's transpose. A sum that leaves the backward pass in
any other way is a derivative that includes other devices.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import Mesh, PartitionSpec

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.step import trace_context
from spmdkit.step.model_state.dependence import Depends, Walk

_CASTS = frozenset(["pvary", "pcast"])


def summed_by_types(typed: ClosedJaxpr, untyped: ClosedJaxpr, axes: Collection[str]) -> str | None:
    """Returns the source line of the first sum over any of `axes` that occurs only with types, or None."""
    known = collections.Counter(_sums(untyped.jaxpr, axes))
    typed_sums = list(_sums(typed.jaxpr, axes))
    known.subtract(typed_sums)
    more = [line for line in dict.fromkeys(typed_sums) if known[line] < 0]
    leaving = _leaving(typed, more, axes, set(_sums(untyped.jaxpr, axes))) if more else set()
    return next((line for line in more if line in leaving), None)


def refuse_summed(what: str, typed: ClosedJaxpr, untyped: Callable[[], ClosedJaxpr], axes: Collection[str]) -> None:
    """Raises ConfigError if the function `what` differentiates with respect to a value that is invariant along one of
    `axes`. `untyped` traces it without types; not called for a function without sums in a transpose."""
    if _sums_backward(typed, axes) and (line := summed_by_types(typed, untyped(), axes)) is not None:
        raise ConfigError(
            f"{what} takes a derivative with respect to a value that is the same along {sorted(axes)}, at {line}. JAX "
            "sums such a derivative over those devices, so each would get the derivative of all devices' examples. "
            "Differentiate with respect to a varying value: `x * 0` instead of a constant or `jnp.zeros(...)`, "
            "`jax.lax.pcast(w, axes, to='varying')` instead of `w`."
        )


def traced(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, shapes: Sequence[Any], typed: bool) -> ClosedJaxpr:
    """Returns the trace of `fn` on shards of arrays of these shapes, with or without types. Results are not checked."""

    def probe(*shards: jax.Array) -> jax.Array:
        fn(*shards)
        return jnp.zeros(())

    mapped = jax.shard_map(probe, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=typed)
    with compat.hide_spmd_vmap_axes():
        return jax.make_jaxpr(mapped)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes))


def takes_derivative(closed: ClosedJaxpr) -> bool:
    """Returns whether a trace contains a transpose. Types add sums only in transposes."""
    return any(map(_is_backward, jaxprs.equations(closed)))


def _sums(jaxpr: Any, axes: Collection[str]) -> Iterator[str]:
    """Yields the source line of every sum over any of `axes`, once per summed array. Sums of reducers are excluded."""
    for eqn, (line, is_reducers) in jaxprs.equations_within(jaxpr, ("", False), _place):
        if _adds_over(eqn, axes) and not is_reducers:
            yield from [line] * len(eqn.invars)


def _sums_backward(closed: ClosedJaxpr, axes: Collection[str]) -> bool:
    """Returns whether a transpose contains a sum over any of `axes`."""
    enter: Callable[[Any, bool], tuple[bool, bool]] = lambda eqn, outer: (outer or _is_backward(eqn),) * 2
    return any(backward and _adds_over(eqn, axes) for eqn, backward in jaxprs.equations_within(closed, False, enter))


def _leaving(closed: ClosedJaxpr, lines: Sequence[str], axes: Collection[str], own: Collection[str]) -> set[str]:
    """Returns the `lines` with a sum that leaves the backward pass other than through a cast at one of the lines
    `own`."""
    walk = _Backward(frozenset(), 0, tuple(lines), frozenset(axes), frozenset(own))
    out = walk.run(closed.jaxpr, [Depends()] * len(closed.jaxpr.invars))
    bits = walk.left[0]
    for depends in out:
        bits |= depends.all
    return {line for i, line in enumerate(lines) if bits >> i & 1}


@dataclass(frozen=True)
class _Backward(Walk):
    """Tracks the sums of backward passes, one bit per line of `lines`, until they pass a cast at a line of `own`.

    Attributes:
        left: an int; the bits of sums that are used outside of a backward pass, or not used.
        around: a stack of (whether an outer equation is backward, its line).
        used: a stack of the variables that a jaxpr uses.
    """

    lines: tuple[str, ...]
    over: frozenset[str]
    own: frozenset[str]
    left: list[int] = field(default_factory=lambda: [0])
    around: list[tuple[bool, str]] = field(default_factory=lambda: [(False, "")])
    used: list[set[Any]] = field(default_factory=list)

    def run(self, jaxpr: Any, given: Sequence[Depends]) -> list[Depends]:
        atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
        self.used.append({var for var in atoms if isinstance(var, Var)})
        found = super().run(jaxpr, given)
        self.used.pop()
        return found

    def results(self, eqn: Any, given: list[Depends]) -> list[Depends]:
        backward, line = self.around[-1]
        backward, line = backward or _is_backward(eqn), compat.source_line(eqn) or line
        if not backward:
            self._record_leaving(given)
        if backward and eqn.primitive.name in _CASTS and line in self.own:
            return [Depends()] * len(eqn.outvars)
        self.around.append((backward, line))
        found = super().results(eqn, given)
        self.around.pop()
        if backward and line in self.lines and _adds_over(eqn, self.over):
            found = [Depends(0, depends.all | 1 << self.lines.index(line)) for depends in found]
        self._record_leaving(
            depends for var, depends in zip(eqn.outvars, found, strict=True) if var not in self.used[-1]
        )
        return found

    def _record_leaving(self, given: Iterable[Depends]) -> None:
        for depends in given:
            self.left[0] |= depends.all


def _is_backward(eqn: Any) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _adds_over(eqn: Any, axes: Collection[str]) -> bool:
    return eqn.primitive.name.startswith("psum") and not jaxprs.axis_names(eqn).isdisjoint(axes)


def _place(eqn: Any, around: tuple[str, bool]) -> tuple[tuple[str, bool], tuple[str, bool]]:
    """Returns (line of the equation or of its outer equation, whether it belongs to a reducer), for it and its body."""
    line, is_reducers = around
    here = (compat.source_line(eqn) or line, is_reducers or trace_context.REDUCE in str(eqn.source_info.name_stack))
    return here, here
