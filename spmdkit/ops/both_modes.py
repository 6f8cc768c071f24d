"""`both_modes(forward, tangent, backward)`: a function with a hand-written gradient, like `jax.custom_vjp`, and with a
forward mode.

A `jax.custom_vjp` has no forward mode: JAX rejects `jax.jvp`. Here the derivative is one operation that is linear in
the tangents. If it is computed, `tangent` computes it. If it is transposed, as in reverse mode, `backward` replaces it,
and `tangent` is never traced. So a first derivative in reverse mode is the program of a `custom_vjp`, with the same
residuals: those that `forward` saves.

Both are ordinary functions with derivatives of their own, in any mode, as far as they have any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from spmdkit import compat
from spmdkit.ops.residuals import floats


def both_modes(
    forward: Callable[..., tuple[Any, Any]],
    tangent: Callable[[Any, Any], Any],
    backward: Callable[[Any, Any], Any],
    alone: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns `forward(*args)[0]` as a function with derivatives in both modes.

    Args:
        forward: `(*args) -> (result, kept)`, pytrees of arrays.
        tangent: `(kept, tangents) -> tangent of the result`, linear in the tangents: a tuple like `args`, None for
            integers.
        backward: `(kept, cotangent of the result) -> cotangents`, the transpose of `tangent`: a tuple like `args`, None
            for integers.
        alone: `(*args) -> result` without a derivative; default: `forward`. With it, `forward` can call the
            function that is returned, and so have derivatives that its own operations have not.
    """

    @jax.custom_jvp
    def in_both_modes(*args: Any) -> Any:
        return forward(*args)[0] if alone is None else alone(*args)

    def of_tangents(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        with compat.where_values_are_known(args):
            result, kept = forward(*args)
        of_tree: Any
        of_kept: Any
        of_result: Any
        leaves, of_tree = jax.tree.flatten(args)
        fixed, of_kept = jax.tree.flatten(kept)
        results, of_result = jax.tree.flatten(result)
        given = dict(enumerate(of_tree.flatten_up_to(tangents)))
        given = {i: given[i] for i in floats(leaves) if not isinstance(given[i], jax.custom_derivatives.SymbolicZero)}
        like = {i: _Type.of(leaves[i]) for i in floats(leaves)}
        float_results = floats(results)

        def push(fixed: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> list[jax.Array]:
            found = dict(zip(given_args, tangents, strict=True))
            whole = [found.get(i, like[i].zeros()) if i in like else None for i in range(of_tree.num_leaves)]
            out = of_result.flatten_up_to(tangent(of_kept.unflatten(fixed), of_tree.unflatten(whole)))
            return [out[i] for i in float_results]

        def pull(fixed: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[jax.Array]:
            found = dict(zip(float_results, cotangents, strict=True))
            whole = [found.get(i) for i in range(of_result.num_leaves)]
            grads = of_tree.flatten_up_to(backward(of_kept.unflatten(fixed), of_result.unflatten(whole)))
            return [grads[i] for i in given_args]

        given_args = tuple(given)
        linear = _Linear(push, pull, len(fixed), tuple(_Type.of(results[i]) for i in float_results))
        found = dict(zip(float_results, linear.bind(*fixed, *given.values()), strict=True))
        none = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        return result, of_result.unflatten([found[i] if i in found else none(x) for i, x in enumerate(results)])

    in_both_modes.defjvp(of_tangents, symbolic_zeros=True)
    return in_both_modes


class _Type(NamedTuple):
    """Shape and dtype of an array, and the mesh axes along which it differs."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]

    @classmethod
    def of(cls, x: Any) -> _Type:
        return cls(tuple(x.shape), x.dtype, tuple(sorted(compat.varying_axes(x))))

    def zeros(self) -> jax.Array:
        return compat.as_varying(jnp.zeros(self.shape, self.dtype), self.axes)


class _Linear(NamedTuple):
    """An operation `(*fixed, *tangents) -> tangents` that is linear in the tangents, and its transpose.

    Attributes:
        push: `(fixed, tangents) -> tangents`.
        pull: `(fixed, cotangents) -> cotangents`.
        num_fixed: the number of operands before the tangents.
        types: of the results.
    """

    push: Callable[..., list[jax.Array]]
    pull: Callable[..., list[jax.Array]]
    num_fixed: int
    types: tuple[_Type, ...]

    def bind(self, *operands: Any) -> list[jax.Array]:
        found: list[jax.Array] = _linear_p.bind(*operands, linear=self)
        return found

    def apply(self, *operands: Any) -> list[jax.Array]:
        out = self.push(operands[: self.num_fixed], operands[self.num_fixed :])
        return [compat.as_varying(x, t.axes) for x, t in zip(out, self.types, strict=True)]


_linear_p = jax.extend.core.Primitive("spmdkit_linear")
_linear_p.multiple_results = True


@_linear_p.def_impl
def _impl(*operands: Any, linear: _Linear) -> list[jax.Array]:
    return linear.apply(*operands)


@_linear_p.def_abstract_eval
def _abstract(*_: Any, linear: _Linear) -> list[Any]:
    return [compat.varying_aval(t.shape, t.dtype, frozenset(t.axes)) for t in linear.types]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, linear: _Linear) -> Any:
    """The derivative by the tangents is the operation itself; that by the fixed operands is the one of `push`."""
    num, out = linear.num_fixed, linear.bind(*primals)
    moved = [i for i, t in enumerate(tangents[:num]) if not isinstance(t, ad.Zero)]
    found: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    if any(not isinstance(t, ad.Zero) for t in tangents[num:]):
        found = linear.bind(*primals[:num], *map(ad.instantiate_zeros, tangents[num:]))
    if not moved:
        return out, found

    def of_moved(*xs: jax.Array) -> list[jax.Array]:
        given = list(primals)
        for i, x in zip(moved, xs, strict=True):
            given[i] = x
        return linear.apply(*given)

    _, more = jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])
    return out, [m if isinstance(f, ad.Zero) else f + m for f, m in zip(found, more, strict=True)]


def _transpose(cotangents: Sequence[Any], *operands: Any, linear: _Linear) -> list[Any]:
    num = linear.num_fixed
    grads = linear.pull(operands[:num], [ad.instantiate_zeros(c) for c in cotangents])
    wanted = zip(grads, operands[num:], strict=True)
    return [None] * num + [g if ad.is_undefined_primal(x) else None for g, x in wanted]


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, linear: _Linear) -> Any:
    """Maps both directions; a tangent that is not mapped gets the sum of its cotangents. Without a mapped operand no
    result is mapped."""
    if all(d is None for d in dims):
        return linear.bind(*operands), [None] * len(linear.types)
    num, mapped = linear.num_fixed, [d is not None for d in dims]
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    of_fixed, of_tangents = ([0 if m else None for m in part] for part in (mapped[:num], mapped[num:]))
    over = functools.partial(jax.vmap, axis_size=axis_data.size, spmd_axis_name=axis_data.spmd_name)

    def pull(fixed: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        grads = over(linear.pull, in_axes=(of_fixed, 0))(list(fixed), list(cotangents))
        return [g if d == 0 else g.sum(0) for g, d in zip(grads, of_tangents, strict=True)]

    def push(fixed: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> list[jax.Array]:
        found: list[jax.Array] = over(linear.push, in_axes=(of_fixed, of_tangents))(list(fixed), list(tangents))
        return found

    types = tuple(t._replace(shape=(axis_data.size, *t.shape)) for t in linear.types)
    out = _Linear(push, pull, num, types).bind(*moved)
    return out, [0] * len(out)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.fancy_primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(lambda *xs, linear: linear.apply(*xs), multiple_results=True))
