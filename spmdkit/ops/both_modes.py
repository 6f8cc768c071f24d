"""`both_modes(forward, tangent, backward)`: a function with a custom gradient, like `jax.custom_vjp`, and a forward
mode.

The derivative is one operation that is linear in the tangents. Forward mode evaluates it with `tangent`. Reverse mode
transposes it: `backward` replaces it and `tangent` is never traced, so a first derivative in reverse mode is the same
program as with `custom_vjp`. Both functions can be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from spmdkit import compat

Arrays = Sequence[jax.Array]


def both_modes(
    forward: Callable[..., tuple[jax.Array, Arrays]],
    tangent: Callable[[Arrays, Arrays], jax.Array],
    backward: Callable[[Arrays, jax.Array], Arrays],
) -> Callable[..., jax.Array]:
    """Returns `(fixed, *args) -> forward(fixed, *args)[0]`, differentiable with respect to `args` in both modes.

    Args:
        forward: `(fixed, *args) -> (result, kept)`; `args` and the result are floats, `kept` are the residuals.
        tangent: `(kept, tangents of args) -> tangent of the result`, linear in the tangents.
        backward: `(kept, cotangent of the result) -> cotangents of args`, the transpose of `tangent`.
    """

    @jax.custom_jvp
    def in_both_modes(fixed: jax.Array, *args: jax.Array) -> jax.Array:
        return forward(fixed, *args)[0]

    @in_both_modes.defjvp
    def of_tangents(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        with compat.where_values_are_known(args):
            result, kept = forward(*args)
        linear = _Linear(tangent, backward, len(kept), result.shape, result.dtype, compat.varying_axes(result))
        return result, linear.bind(*kept, *tangents[1:])

    return in_both_modes


class _Linear(NamedTuple):
    """An operation `(*fixed, *tangents) -> tangent` that is linear in the tangents, and its transpose `pull`.
    `num_fixed` operands precede the tangents; `shape`, `dtype` and `axes` (along which it varies) describe the
    result."""

    push: Callable[[Arrays, Arrays], jax.Array]
    pull: Callable[[Arrays, jax.Array], Arrays]
    num_fixed: int
    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]

    def bind(self, *operands: Any) -> jax.Array:
        out: jax.Array = _linear_p.bind(*operands, linear=self)
        return out

    def apply(self, *operands: Any) -> jax.Array:
        out = self.push(operands[: self.num_fixed], operands[self.num_fixed :])
        return compat.as_varying(out, sorted(self.axes))


_linear_p = jax.extend.core.Primitive("spmdkit_linear")


def _impl(*operands: Any, linear: _Linear) -> jax.Array:
    return linear.apply(*operands)


def _abstract(*_: Any, linear: _Linear) -> Any:
    return compat.varying_aval(linear.shape, linear.dtype, linear.axes)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, linear: _Linear) -> Any:
    """The derivative by the tangents is the operation itself; by the fixed operands, it is the derivative of `push`."""
    num, out = linear.num_fixed, linear.bind(*primals)
    perturbed = [i for i, t in enumerate(tangents[:num]) if not isinstance(t, ad.Zero)]
    tangent: Any = ad.Zero(jax.typeof(out).to_tangent_aval())
    if any(not isinstance(t, ad.Zero) for t in tangents[num:]):
        tangent = linear.bind(*primals[:num], *map(ad.instantiate_zeros, tangents[num:]))
    if not perturbed:
        return out, tangent

    def of_moved(*xs: jax.Array) -> jax.Array:
        full_operands = list(primals)
        for i, x in zip(perturbed, xs, strict=True):
            full_operands[i] = x
        return linear.apply(*full_operands)

    fixed_tangent = jax.jvp(of_moved, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])[1]
    return out, fixed_tangent if isinstance(tangent, ad.Zero) else tangent + fixed_tangent


def _transpose(cotangent: Any, *operands: Any, linear: _Linear) -> list[Any]:
    num = linear.num_fixed
    grads = linear.pull(operands[:num], ad.instantiate_zeros(cotangent))
    pairs = zip(grads, operands[num:], strict=True)
    return [None] * num + [g if ad.is_undefined_primal(x) else None for g, x in pairs]


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, linear: _Linear) -> Any:
    """Maps both directions; an unmapped tangent gets the sum of its cotangents. Without mapped operands the result is
    unmapped."""
    if all(d is None for d in dims):
        return linear.bind(*operands), None
    num, mapped = linear.num_fixed, [None if d is None else 0 for d in dims]
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    over = functools.partial(jax.vmap, axis_size=axis_data.size, spmd_axis_name=axis_data.spmd_name)

    def pull(fixed: Arrays, cotangent: jax.Array) -> Arrays:
        grads = over(linear.pull, in_axes=(mapped[:num], 0))(list(fixed), cotangent)
        return [g if d == 0 else g.sum(0) for g, d in zip(grads, mapped[num:], strict=True)]

    def push(fixed: Arrays, tangents: Arrays) -> jax.Array:
        return over(linear.push, in_axes=(mapped[:num], mapped[num:]))(list(fixed), list(tangents))

    shape = (axis_data.size, *linear.shape)
    return linear._replace(push=push, pull=pull, shape=shape).bind(*moved), 0


_linear_p.def_impl(_impl)
_linear_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.fancy_primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(lambda *xs, linear: linear.apply(*xs), multiple_results=False))
