"""`kernel(fn)`: a hand-written kernel inside of `sk.manual`, where arrays carry the mesh axes along which they differ.

`pallas_call` wants those axes written into the shapes of its results, and kernels that others maintain do not write them
(splash attention of jax 0.10.2: "`manual_axis_type` on `jax.ShapeDtypeStruct` must not be `None`"). So `fn` becomes one
operation whose results differ along every axis along which an operand does, and which is traced without these types. That is
right for whatever sends nothing to other devices. It has no gradient of its own: use it inside a `jax.custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from spmdkit import compat


def kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn(*arrays) -> arrays`, traced without the types of `shard_map`; `fn` sends nothing to other devices."""

    def run(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        flat = lambda *xs: tuple(jax.tree.leaves(fn(*jax.tree.unflatten(treedef, xs))))
        with compat.untyped_axes():
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
            out = jax.eval_shape(lambda *xs: fn(*jax.tree.unflatten(treedef, xs)), *shapes)
        results = _kernel_p.bind(*leaves, fn=flat, shapes=tuple((x.shape, x.dtype) for x in jax.tree.leaves(out)))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run


_kernel_p = jax.extend.core.Primitive("spmdkit_kernel")
_kernel_p.multiple_results = True


@_kernel_p.def_impl
def _impl(*args: Any, fn: Callable[..., Any], shapes: Any) -> Any:
    return jax.jit(fn)(*args)


@_kernel_p.def_abstract_eval
def _abstract(*avals: Any, fn: Callable[..., Any], shapes: Any) -> list[Any]:
    axes = frozenset().union(*(compat.varying_axes_of(a) for a in avals))
    return [compat.varying_aval(shape, dtype, axes) for shape, dtype in shapes]


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, fn: Callable[..., Any], shapes: Any) -> Any:
    num = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = jax.vmap(fn, in_axes=tuple(None if d is None else 0 for d in dims))
    out = _kernel_p.bind(*moved, fn=mapped, shapes=tuple(((num, *shape), dtype) for shape, dtype in shapes))
    return out, [0] * len(out)


def _lower(ctx: Any, *args: Any, fn: Callable[..., Any], shapes: Any) -> Any:
    del shapes
    with compat.untyped_axes():
        return mlir.lower_fun(fn, multiple_results=True)(compat.without_axes(ctx), *args)


batching.primitive_batchers[_kernel_p] = _batch
mlir.register_lowering(_kernel_p, _lower)
