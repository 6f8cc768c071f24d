"""`conditional_update`: a step that leaves its state unchanged if a flag is set. Each leaf is selected directly after
it is computed, not at the end of the step.

    mu' = b mu + (1 - b) g                 mu' = skip ? mu : b mu + (1 - b) g
    p'  = p - r mu'                        p'  = skip ? p  : p - r mu'
    mu' = skip ? mu : mu'                  (a value computed from mu' is also selected, or is a metric of a skipped
                                           step)
    p'  = skip ? p  : p'

The two columns compute the same state. On the left the old and the new `mu` are live together, so XLA copies them: with
Adam, `skip` then reads six more gradients. On the right it reads none (CPU, jaxlib 0.10.2, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from spmdkit.foundation.jaxprs import needed_eqns

New = TypeVar("New")
Rest = TypeVar("Rest")


def conditional_update(step: Callable[..., tuple[New, Rest, jax.Array]], old: New, *args: Any) -> tuple[New, Rest]:
    """Returns (new, rest) of `step(*args) -> (new, rest, skip)`, with the leaves of `old` where `skip` is true.

    Args:
        step: traced once. In a skipped step, `rest` may be computed from old leaves instead of new ones.
        old: has the tree structure of `new`; its leaves may be among `args`.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    jaxpr, olds = closed.jaxpr, jax.tree.leaves(old)
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
    outs, flag = jaxpr.outvars[: len(olds)], jaxpr.outvars[-1]
    read: Callable[[Any], Any] = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]
    first = list(jaxpr.eqns) if jaxpr.effects else needed_eqns(jaxpr.eqns, [flag])  # effects keep their order
    ids = set(map(id, first))
    later = [eqn for eqn in jaxpr.eqns if id(eqn) not in ids]
    _run(jaxpr, first, later, env)
    skip = read(flag)
    choose, done = _known_when_skipped(outs, olds, later)
    begin = 0
    for end, eqn in enumerate(later, 1):
        if end == len(later) or any(v in choose for v in eqn.outvars):
            _run(jaxpr, later[begin:end], later[end:], env)
            env |= {v: jnp.where(skip, choose[v], env[v]) for v in eqn.outvars if v in choose}
            begin = end
    new = [read(v) if v in done else jnp.where(skip, a, read(v)) for v, a in zip(outs, olds, strict=True)]
    rest = jax.tree.unflatten(jax.tree.structure(shapes[1]), [read(v) for v in jaxpr.outvars[len(olds) : -1]])
    return jax.tree.unflatten(jax.tree.structure(old), new), rest


def _known_when_skipped(
    outs: Sequence[Any], olds: Sequence[Any], later: Sequence[Any]
) -> tuple[dict[Var, Any], set[Var]]:
    """Returns (variable -> its value in a skipped step, the results that need no selection at the end)."""
    eqn_of = {v: eqn for eqn in later for v in eqn.outvars}
    choose, done = dict[Var, Any](), set[Var]()
    for v, old in zip(outs, olds, strict=True):
        if isinstance(v, Literal) or outs.count(v) > 1:
            continue
        var = v
        while var in eqn_of and eqn_of[var].primitive.name == "sharding_constraint":  # does not change the value
            var = eqn_of[var].invars[0]
        if isinstance(var, Var) and var in eqn_of and var not in choose and (var is v or var not in outs):
            choose[var] = old
            done.add(v)
    return choose, done


def _run(jaxpr: Any, eqns: Sequence[Any], later: Sequence[Any], env: dict[Var, Any]) -> None:
    """Evaluates equations and adds the results to `env` that later equations or the outputs of the jaxpr use."""
    produced = {v for eqn in eqns for v in eqn.outvars}
    needed_atoms = [*(v for eqn in later for v in eqn.invars), *jaxpr.outvars]
    inputs = list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var) and v not in produced))
    outputs = list(dict.fromkeys(v for v in needed_atoms if isinstance(v, Var) and v in produced))
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=list(eqns), debug_info=names)
    env |= dict(zip(outputs, jaxpr_as_fun(ClosedJaxpr(part, ()))(*(env[v] for v in inputs)), strict=True))
