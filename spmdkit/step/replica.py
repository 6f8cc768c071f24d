"""The per-replica dialect: the whole step runs inside `shard_map`, and the user writes the reductions.

It is the dialect of TensorFlow's `strategy.run`, Horovod and pmap. In it, parameters are the replica's own copy (typed
varying), so `jax.grad` gives the replica's own gradient; `sk.pmean` makes one of all; what leaves as the new state must be
provably mirrored. Two mistakes give gradients that are N times too large without an error in plain JAX, and are errors
here: reducing what is already reduced, and not reducing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.extend
from jax import lax

from spmdkit import compat, jaxprs
from spmdkit.errors import ConfigError
from spmdkit.mesh import REPLICA_AXES
from spmdkit.step import scope
from spmdkit.step.metric import crossed, is_metric
from spmdkit.tree import named_leaves


def psum(tree: Any) -> Any:
    """Returns the sum of `tree` over all replicas; every replica holds the same.

    Wire: one all-reduce of the tree.

    Raises:
        ConfigError: a leaf is already the same on all replicas, so the sum would be a factor of N.
    """
    return _reduce("sk.psum", lax.psum, tree)


def pmean(tree: Any) -> Any:
    """Returns the mean of `tree` over all replicas. A `sk.mean` in it is pooled by its counts, not averaged; other metrics merge.

    Wire: one all-reduce of the tree.

    Raises:
        ConfigError: a leaf is already the same on all replicas, so it was reduced twice.
    """
    summed = _reduce("sk.pmean", lax.psum, tree)
    num = scope.current().cuts.size(*REPLICA_AXES)
    return jax.tree.map(lambda x: x if is_metric(x) else x / num, summed, is_leaf=is_metric)


def _reduce(name: str, reduce: Callable[..., Any], tree: Any) -> Any:
    context = scope.current()
    if not context.inside:
        raise ConfigError(
            f"{name} was called outside of a per-replica step. In the global view arrays are global and nothing is left to reduce. "
            "Remove it, or give the task view='replica'."
        )
    for path, leaf in named_leaves(tree) if compat.axes_are_typed() else ():
        varying = compat.varying_axes(leaf)
        if not varying or any(context.cuts.size(axis) > 1 and axis not in varying for axis in REPLICA_AXES):
            raise ConfigError(_twice(name, f"leaf '{path}'" if path else "the value"))
    with jax.named_scope(scope.REDUCE):
        return crossed(tree, lambda sums: reduce(sums, REPLICA_AXES), lambda maxima: lax.pmax(maxima, REPLICA_AXES))


def _twice(name: str, what: str) -> str:
    return (
        f"{name}: {what} is already the same on every replica: it was reduced twice. Another sum would make it N times too "
        "large. Remove one of the two reductions (sk.value_and_grad has already reduced). If it is a derivative with respect to a constant, "
        "JAX has added it up: differentiate with respect to something of the replica's own, `x * 0` instead of `jnp.zeros(...)`."
    )


def check_reductions(jaxpr: jax.extend.core.ClosedJaxpr, axes: Collection[str] = REPLICA_AXES) -> None:
    """Refuses a `lax.psum` or `lax.pmean` over something that is already the same on every replica.

    JAX casts such an operand to varying and multiplies by N without a word: the pattern `pvary` followed by `psum`. A
    constant, as in `lax.psum(1, axis)` to count replicas, is fine.

    Args:
        axes: the replica axes larger than one; over the others a sum changes nothing.

    Raises:
        ConfigError: the pattern occurs, with the user's source line.
    """
    for body in _bodies(jaxpr):
        depends: set[Any] = set(body.invars)
        cast: set[Any] = set()
        for eqn in body.eqns:
            inputs = [v for v in eqn.invars if isinstance(v, jax.extend.core.Var)]
            if any(v in depends for v in inputs):
                depends.update(eqn.outvars)
            casts = eqn.primitive.name in ("pvary", "pcast") and set(axes) & set(eqn.params["axes"])
            if casts and inputs and inputs[0] in depends:
                cast.update(eqn.outvars)
            reduces = eqn.primitive.name in ("psum_invariant", "psum", "psum2")
            if reduces and set(axes) & set(eqn.params["axes"]) and any(v in cast for v in inputs):
                raise ConfigError(_twice("lax.psum or lax.pmean", f"the operand at {compat.source_line(eqn)}"))


def _bodies(jaxpr: Any) -> Iterator[Any]:
    """Yields the bodies of the shard_maps in a jaxpr, and every jaxpr inside them."""
    is_map = lambda eqn: eqn.primitive.name == "shard_map"
    for eqn in jaxprs.equations(jaxpr, into=lambda eqn: not is_map(eqn)):
        if is_map(eqn):
            for body in jaxprs.inner(eqn):
                yield from jaxprs.bodies(body)
