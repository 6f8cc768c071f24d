"""`kernel(fn, flops)`: a hand-written kernel inside `sk.manual`, where the types of arrays hold the mesh axes over
which they vary.

`pallas_call` requires those axes in the shapes of its results, and third-party kernels do not set them (splash
attention of jax 0.10.2). So `fn` becomes one operation, traced without these types. Its results vary over every axis
over which an operand varies, which is correct for code without communication. It has no gradient. XLA assumes that a
kernel without a cost estimate is free, and overlaps no transfer with it: on v5p every step of the ring waited for its
keys (libtpu 0.0.42, 2026-11-21). This module therefore sets the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs


def kernel(fn: Callable[..., Any], flops: float) -> Callable[..., Any]:
    """Returns `fn(*arrays) -> arrays`, traced without the types of `shard_map`; `fn` does not communicate.

    `flops`: arithmetic of `fn`, for `plan` and XLA's scheduler; divided among its `pallas_call`s that set no cost.
    """

    def kernel_call(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        with compat.untyped_axes():
            flat = lambda *xs: fn(*jax.tree.unflatten(treedef, xs))
            jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*shapes)
        num_calls = sum(map(_is_call, jaxprs.equations(jaxpr, into=lambda eqn: not _is_call(eqn))))
        if num_calls:
            jaxpr = jaxpr.replace(jaxpr=_with_cost(jaxpr.jaxpr, int(flops / num_calls)))
        return jax.tree.unflatten(jax.tree.structure(out), _kernel_p.bind(*leaves, jaxpr=jaxpr, flops=flops))

    return kernel_call


def _is_call(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "pallas_call")


def _with_cost(jaxpr: Any, flops: int) -> Any:
    """Returns the jaxpr with a cost for every `pallas_call` that sets none: `flops`, and the bytes of each operand and
    result."""

    from jax.experimental import pallas

    def changed(eqn: Any) -> Any:
        if _is_call(eqn):
            if eqn.params["cost_estimate"] is not None:
                return eqn
            moved = sum(v.aval.size * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars))
            cost = pallas.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved)
            return eqn.replace(params=eqn.params | {"cost_estimate": cost})
        if not list(jaxprs.inner_jaxprs(eqn)):
            return eqn
        return eqn.replace(params={name: inside(value) for name, value in eqn.params.items()})

    def inside(value: Any) -> Any:
        if isinstance(value, jax.extend.core.ClosedJaxpr):
            return value.replace(jaxpr=_with_cost(value.jaxpr, flops))
        return _with_cost(value, flops) if isinstance(value, jax.extend.core.Jaxpr) else value

    return jaxpr.replace(eqns=[changed(eqn) for eqn in jaxpr.eqns])


_kernel_p = jax.extend.core.Primitive("spmdkit_kernel")
_kernel_p.multiple_results = True


def _impl(*args: Any, jaxpr: Any, flops: float) -> Any:
    return jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*args)


def _abstract(*avals: Any, jaxpr: Any, flops: float) -> list[Any]:
    axes = frozenset().union(*(compat.varying_axes_of(a) for a in avals))
    return [compat.varying_aval(a.shape, a.dtype, axes) for a in jaxpr.out_avals]


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, jaxpr: Any, flops: float) -> Any:
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = jax.vmap(jax.extend.core.jaxpr_as_fun(jaxpr), in_axes=tuple(None if d is None else 0 for d in dims))
    with compat.untyped_axes():
        batched = jax.make_jaxpr(mapped)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in moved))
    num = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    out = _kernel_p.bind(*moved, jaxpr=batched, flops=num * flops)
    return out, [0] * len(out)


def _lower(ctx: Any, *args: Any, jaxpr: Any, flops: float) -> Any:
    with compat.untyped_axes():
        run = mlir.lower_fun(jax.extend.core.jaxpr_as_fun(jaxpr), multiple_results=True)
        return run(compat.without_axes(ctx), *args)


def _jvp(*_: Any, **params: Any) -> Any:
    raise ConfigError(
        "a second derivative, or one in forward mode, goes through a kernel (attention by splash or cudnn). A kernel "
        "has a first derivative, by its own backward pass, and no other. Use attention: {implementation: xla}, or "
        "sk.attention(..., implementation='xla')."
    )


_kernel_p.def_impl(_impl)
_kernel_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_kernel_p] = _jvp
batching.primitive_batchers[_kernel_p] = _batch
mlir.register_lowering(_kernel_p, _lower)
