"""Walks over jaxprs: the jaxprs of an equation, all equations of a program, each body separately, and equations with
their context.

A jaxpr may be closed or open; results are open. Rules that depend on the meaning of a primitive (which inputs a scan
carries, how often a body runs) belong to the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

T = TypeVar("T")

_JAXPRS, _SEQUENCES = (ClosedJaxpr, Jaxpr), (tuple, list)  # a union in a call of isinstance is made again in each call

Into = Callable[[Any], bool]
"""Predicate: whether a walk enters the jaxprs of an equation."""


def enter_all(eqn: Any) -> bool:
    """Returns True, so that a walk enters every jaxpr."""
    return True


def function_of(closed: ClosedJaxpr, out: Any) -> Callable[..., Any]:
    """Returns the traced function, on trees. `out`: a tree with the structure of its result."""
    run, structure = jaxpr_as_fun(closed), jax.tree.structure(out)
    return lambda *args: jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns a jaxpr without its constants; an open one unchanged."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs in an equation's parameters: bodies, branches, called functions. For a custom rule, yields the
    function itself."""
    for value in eqn.params.values():
        for item in value if isinstance(value, _SEQUENCES) else (value,):
            if isinstance(item, _JAXPRS):
                yield open_jaxpr(item)


def bodies(jaxpr: Any, into: Into = enter_all) -> Iterator[Any]:
    """Yields a jaxpr and the jaxprs nested in it, outer ones first."""
    body = open_jaxpr(jaxpr)
    yield body
    for eqn in body.eqns:
        if into(eqn):
            for below in inner_jaxprs(eqn):
                yield from bodies(below, into)


def equations(jaxpr: Any, into: Into = enter_all) -> Iterator[Any]:
    """Yields the equations of a jaxpr in order, each before the equations nested in it."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        if into(eqn):
            for below in inner_jaxprs(eqn):
                yield from equations(below, into)


def axis_names(eqn: Any) -> frozenset[str]:
    """Returns the mesh axes of a collective, an axis index or a cast; empty for any other equation."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset((named,) if isinstance(named, str) else named if isinstance(named, tuple | list) else ())


def needed_eqns(eqns: Sequence[Any], wanted: Iterable[Any]) -> list[Any]:
    """Returns the equations on which the wanted variables depend, in order."""
    needs, selected = set(map(id, wanted)), []
    for eqn in reversed(eqns):
        if any(id(var) in needs for var in eqn.outvars):
            selected.append(eqn)
            needs.update(map(id, eqn.invars))
    return selected[::-1]


def equations_within(jaxpr: Any, around: T, enter: Callable[[Any, T], tuple[T, T]]) -> Iterator[tuple[Any, T]]:
    """Yields (equation, its context), in the order of `equations`.

    Args:
        around: the outer context.
        enter: `(equation, outer context) -> (its context, context of the equations nested in it)`.
    """
    for eqn in open_jaxpr(jaxpr).eqns:
        context, inside = enter(eqn, around)
        yield eqn, context
        for below in inner_jaxprs(eqn):
            yield from equations_within(below, inside, enter)
