"""The residuals of a part's gradient: the residuals of `jax.vjp` as a list that one program passes to another.

A part of `sk.manual` runs as one `shard_map` and its gradient as a second one. Both must agree on the list of
residuals. A second trace of the body, under a `vmap` over replicas, has other types and another order. A residual is
therefore identified by the index of its operation among those that depend on the inputs and do not only change types.
JAX 0.12 adds operations on constants where it changes their types.

Values that `remat` selects and that depend on the part's inputs are saved. Others (masks, positions) are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.foundation.jaxprs import needed_eqns
from spmdkit.ops.remat import RESIDUAL_NAME

_TYPES = frozenset({"pvary", "pcast"})
_PASSES = frozenset({"reduce_precision", "optimization_barrier"})


def floats(values: Sequence[Any]) -> list[int]:
    """Returns the positions of the values that have a gradient."""
    return [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]


class Linearized:
    """A function traced at `args`: its results, and its gradient from the arguments and the residuals.

    `kept`: types of the residuals, in the same order in every trace. `made_by`: for each (index of the operation, index
    of its result, name of the operation). `marks`: for each its `checkpoint_name` or KEPT.
    """

    def __init__(self, fn: Callable[..., tuple[jax.Array, ...]], args: Sequence[Any], policy: Any) -> None:
        fn = jax.checkpoint(fn, policy=policy)
        self._floats = floats(args)
        structure: list[Any] = []

        def traced(*args: Any) -> Any:
            def of_floats(*xs: Any) -> Any:
                full_args = list(args)
                for i, x in zip(self._floats, xs, strict=True):
                    full_args[i] = x
                out = fn(*full_args)
                return tuple(out[i] for i in floats(out)), out

            _, vjp, out = jax.vjp(of_floats, *(args[i] for i in self._floats), has_aux=True)
            leaves, treedef = jax.tree.flatten(vjp)
            structure[:] = [len(out), treedef]
            return (*out, *leaves)

        self._closed = jax.make_jaxpr(traced)(*args)
        num_out, self._treedef = structure
        jaxpr = self._closed.jaxpr
        self._results, self._leaves = jaxpr.outvars[:num_out], jaxpr.outvars[num_out:]
        self._origin = _origins(jaxpr)
        depends = _dependents(jaxpr)
        counted = [e for e in jaxpr.eqns if e.primitive.name not in _TYPES and not depends.isdisjoint(e.outvars)]
        producer = {var: (n, i, eqn) for n, eqn in enumerate(counted) for i, var in enumerate(eqn.outvars)}
        origins = {self._origin[var] for var in self._leaves if var in self._origin}
        wanted = [var for var in origins if var in depends and var not in jaxpr.invars]
        self._wanted = sorted(wanted, key=lambda var: producer[var][:2])
        self.kept = [var.aval for var in self._wanted]
        self.made_by = [(n, i, eqn.primitive.name) for n, i, eqn in (producer[var] for var in self._wanted)]
        self.marks = [_saved_name(var, producer) for var in self._wanted]

    def forward(self, args: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns (results of the function, residuals)."""
        values = self._compute(self._closed.jaxpr.eqns, [*self._results, *self._wanted], args)
        return values[: len(self._results)], values[len(self._results) :]

    def backward(
        self, args: Sequence[jax.Array], kept: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Returns the gradients of the arguments that have one."""
        values = dict(zip(self._wanted, kept, strict=True)) | dict(zip(self._closed.jaxpr.invars, args, strict=True))
        again = [var for var in self._leaves if self._origin.get(var) not in values]
        computed: Iterator[jax.Array] = iter(self._compute(needed_eqns(self._closed.jaxpr.eqns, again), again, args))

        def leaf(var: Any) -> jax.Array:
            if (origin := self._origin.get(var)) not in values:
                return next(computed)
            value: jax.Array = compat.as_varying(values[origin], sorted(compat.varying_axes_of(var.aval)))
            return value

        vjp: Callable[[Any], tuple[jax.Array, ...]] = jax.tree.unflatten(self._treedef, map(leaf, self._leaves))
        return vjp(tuple(cotangents))

    def _compute(self, eqns: Sequence[Any], outputs: Sequence[Any], args: Sequence[jax.Array]) -> list[jax.Array]:
        jaxpr = self._closed.jaxpr
        names = jaxpr.debug_info._replace(result_paths=None)
        part = jaxpr.replace(eqns=list(eqns), outvars=list(outputs), debug_info=names)
        closed = jax.extend.core.ClosedJaxpr(part, self._closed.consts)
        results: list[jax.Array] = jax.extend.core.jaxpr_as_fun(closed)(*args)
        return results


def _origins(jaxpr: Any) -> dict[Any, Any]:
    """Returns a map from each variable to the variable of the same value before changes of its type."""
    origin = {var: var for var in (*jaxpr.constvars, *jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            same = eqn.invars[0] if eqn.primitive.name in _TYPES else None
            origin[var] = origin[same] if isinstance(same, jax.extend.core.Var) else var
    return origin


def _dependents(jaxpr: Any) -> set[Any]:
    """Returns the variables that depend on the arguments."""
    dependents = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(isinstance(var, jax.extend.core.Var) and var in dependents for var in eqn.invars):
            dependents.update(eqn.outvars)
    return dependents


def _saved_name(var: Any, producer: dict[Any, Any]) -> str:
    """Returns the `checkpoint_name` of a value, also if JAX adds a `reduce_precision` or a barrier after it."""
    if not isinstance(var, jax.extend.core.Var) or var not in producer:
        return RESIDUAL_NAME
    eqn = producer[var][2]
    if eqn.primitive.name == "name":
        return str(eqn.params["name"])
    return _saved_name(eqn.invars[0], producer) if eqn.primitive.name in _PASSES else RESIDUAL_NAME
