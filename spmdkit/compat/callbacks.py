"""Host callbacks in a program of several devices that JAX (0.10.2) maps or orders on one device only."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def run_callbacks_on_meshes(replica_axes: Collection[str]) -> None:
    """Lets every callback run in a `vmap` over mesh axes and ordered callbacks on several devices. Idempotent.

    An ordered `io_callback`, and a `pure_callback` without `vmap_method`, has no `vmap` rule. In a `vmap` over a mesh
    axis (`spmd_axis_name`, or a name in `replica_axes`) it is called once per replica, in order, with the arrays of
    that replica. `jax.debug.callback(ordered=True)` and `jax.debug.print(ordered=True)` are lowered as an ordered
    `io_callback` is, which JAX accepts on several devices.
    """
    from jax._src import callback, debugging, effects
    from jax.interpreters import batching, mlir

    for primitive in (callback.pure_callback_p, callback.io_callback_p):
        rule = batching.fancy_primitive_batchers[primitive]
        if getattr(rule, "func", None) is not _mapped:
            replace = functools.partial(_mapped, rule, primitive, frozenset(replica_axes))
            batching.fancy_primitive_batchers[primitive] = replace
    if not effects.shardable_ordered_effects.contains(debugging.ordered_debug_effect):
        effects.shardable_ordered_effects.add_type(debugging.OrderedDebugEffect)
        for primitive, rule in (
            (debugging.debug_callback_p, debugging.debug_callback_lowering),
            (debugging.debug_print_p, debugging.debug_print_lowering_rule),
        ):
            for platform in ("cpu", "gpu", "tpu"):
                ordered = functools.partial(_ordered, rule, primitive)
                mlir.register_lowering(primitive, ordered, platform=platform, cacheable=platform != "tpu")


def has_ordered_effects(closed: Any) -> bool:
    """Returns whether a jaxpr calls the host in order: `io_callback`, `jax.debug.callback` or `jax.debug.print` with
    `ordered=True`."""
    from jax._src import effects

    return bool(effects.ordered_effects.filter_in(closed.effects))


def _mapped(
    rule: Any, primitive: Any, replica_axes: Collection[str], axis_data: Any, args: Any, dims: Any, **params: Any
) -> Any:
    over_devices = axis_data.spmd_name is not None or axis_data.name in replica_axes
    has_rule = not params["ordered"] if "ordered" in params else params["vmap_method"] is not None
    if has_rule or not over_devices or all(dim is None for dim in dims):
        return rule(axis_data, args, dims, **params)
    part = lambda i, x, dim: x if dim is None else lax.index_in_dim(x, i, dim, keepdims=False)
    results = [primitive.bind(*map(functools.partial(part, i), args, dims), **params) for i in range(axis_data.size)]
    stacked: list[jax.Array] = [jnp.stack(parts) for parts in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)


def _ordered(rule: Any, primitive: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    from jax._src import callback, debugging
    from jax.interpreters import mlir

    effect, io_effect = debugging.ordered_debug_effect, callback._OrderedIOEffect
    if effect not in ctx.tokens_in.effects():
        return rule(ctx, *args, **params)
    inner = ctx.replace(tokens_in=mlir.TokenSet({io_effect: ctx.tokens_in.get(effect)}))
    call = functools.partial(primitive.impl, **params)
    callback.io_callback_lowering(inner, *args, callback=call, sharding=None, ordered=True, result_avals=())
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: inner.tokens_out.get(io_effect)})))
    return ()
