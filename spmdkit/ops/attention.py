"""`sk.attention`: softmax attention on every mesh; config and devices select the form and the implementation.

    out[B_x, T_c, N_t, H] = softmax(scale q[B_x, T_c, N_t, H] . k[B_x, S_c, K_t, H]^T) v[B_x, S_c, K_t, H]

x: fsdp and expert, c: context, t: tensor. N query heads, K key heads; N / K adjacent query heads share a key head.

    context = 1                      each device computes its heads and examples; no communication
    attention.context: ring          ring_attention.py
    attention.context: all_to_all    all_to_all_attention.py

    implementation    xla (everywhere): attention_blocks.py; cudnn (NVIDIA GPU): attention_cudnn.py; splash (TPU):
                      attention_splash.py. `auto` selects xla if no other is possible.

The forward pass saves q, k, v, `out` and `lse` (named "attention" for `remat`); the backward pass recomputes the scores
block by block. Global view: one `sk.manual` part forward and one backward. Forward mode (`jax.jvp`; xla only) has a
tangent part in place of the backward one. Inside `sk.manual` the arguments are shards, with the key heads of the
device's query heads (`own_kv_heads`), and the function runs directly.
Wire: see the files of the two forms. If K is less than the tensor axis t, the key heads are repeated r = t / K times.
dk and dv are then summed over the copies: (2 (r-1)/r + K-1) (|dk| + |dv|), with |dk| the bytes of the head on one
device.
Source: Vaswani et al. (2017); Ainslie et al., "GQA" (2023), for the grouped heads.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.mesh.chips import chip_of_device_kind
from spmdkit.ops import all_to_all_attention, attention_cudnn, attention_splash, ring_attention
from spmdkit.ops.all_to_all_attention import Residuals
from spmdkit.ops.attention_blocks import XLA, Implementation, Keys
from spmdkit.ops.attention_splash import Tiles, tiles_of
from spmdkit.ops.both_modes import both_modes
from spmdkit.ops.collectives import axes, axis_index, axis_size
from spmdkit.ops.context import chunks, order
from spmdkit.ops.manual import is_sharded, manual
from spmdkit.step import trace_context

IMPLEMENTATIONS = ("xla", "cudnn", "splash")

HEADS = ("batch", "sequence", "heads", None)
ROWS = ("batch", "sequence")
HEADS_SHARDED = ("batch", None, "heads+sequence", None)
RESIDUAL_DIMS = Residuals(HEADS, HEADS, HEADS, HEADS, (*ROWS, "heads"))
RESIDUAL_DIMS_BY_HEADS = Residuals(HEADS_SHARDED, HEADS_SHARDED, HEADS_SHARDED, HEADS_SHARDED, HEADS_SHARDED[:3])


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool = True,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the attention of each query over its visible keys, [B, T, N, H] in the dtype of `q`.

    On a mesh with a context axis the tokens must be in mesh order: reorder them once with `sk.context_order`.

    Args:
        causal: a query attends to the keys at its position and earlier positions.
        positions_BT: int32[B, T] or [T], token positions for the causal mask; default: `sk.context_positions`, which is
            cheaper, since masked blocks are known and skipped.
        segment_ids_BT: int32[B, T], for packed sequences: tokens attend only to their segment. A negative id is
            padding, with a result of zeros.
        scale: factor of the scores; default `1 / sqrt(H)`.
        implementation: overrides the config's `attention.implementation`.

    Layout: q, k, v and the result as `batch`, `sequence`, `heads`; ids as `batch`, `sequence`.

    Raises:
        ConfigError: shapes do not match each other or the mesh; the implementation does not support them or the device;
            tokens are not in mesh order.
    """
    context = trace_context.current()
    context.usage.record_call("attention")
    _check_shapes(q_BTNH, k_BSKH, v_BSKH, causal, positions_BT, segment_ids_BT)
    _check_mesh(context, q_BTNH, causal, positions_BT)
    call = _Call(
        context,
        _implementation(
            context, implementation, q_BTNH, k_BSKH, causal, segment_ids_BT is not None, positions_BT is not None
        ),
        causal,
        1 / math.sqrt(q_BTNH.shape[3]) if scale is None else float(scale),
        context.options.attention.context == "all_to_all" and axis_size("sequence") > 1,
    )
    positions = positions_BT[None] if positions_BT is not None and positions_BT.ndim == 1 else positions_BT
    k_BSKH, v_BSKH = (_repeated(context, x) for x in (k_BSKH, v_BSKH))
    ids, *operands = _typed_alike(context, (Keys(None, None, segment_ids_BT, positions), q_BTNH, k_BSKH, v_BSKH))
    out_BTNH: jax.Array = _differentiable(call, ids)(ids, *operands)
    if segment_ids_BT is not None:
        out_BTNH = jnp.where(segment_ids_BT[:, :, None, None] < 0, 0, out_BTNH)
    return out_BTNH


def own_kv_heads(x_BSKH: jax.Array) -> jax.Array:
    """Inside `sk.manual`: returns the key heads of this device's query heads, from all K key heads. Use it for fewer
    key heads than the tensor axis, which are replicated."""
    num, tensor = x_BSKH.shape[2], axis_size("heads")
    repeated = jnp.repeat(x_BSKH, math.lcm(num, tensor) // num, axis=2)
    heads_per_device = repeated.shape[2] // tensor
    return lax.dynamic_slice_in_dim(repeated, axis_index("heads") * heads_per_device, heads_per_device, axis=2)


# ---- two parts, forward and backward


class _Call(NamedTuple):
    """The fixed settings of one call of `attention`."""

    context: trace_context.Context
    implementation: Implementation
    causal: bool
    scale: float
    by_heads: bool

    @property
    def fixed(self) -> tuple[Implementation, bool, float]:
        return self.implementation, self.causal, self.scale


def _differentiable(call: _Call, ids: Keys) -> Any:
    """Returns `(ids, q, k, v) -> out`, differentiable; all passes use the trace context of the call."""
    kept_dims, keys_dims = RESIDUAL_DIMS_BY_HEADS if call.by_heads else RESIDUAL_DIMS, _keys_dims(ids)
    out_dims = (HEADS, kept_dims if call.by_heads else RESIDUAL_DIMS.lse)
    residuals_and_ids: Any = jax.tree.structure((Residuals(*range(5)), ids))
    in_part = functools.partial(manual, kernel=call.implementation is not XLA)

    def forward(ids: Keys, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        with trace_context.tracing(call.context):
            part = in_part(_forward(call), [HEADS, keys_dims], out_dims)
            out, residuals = jax.tree.map(lambda x: checkpoint_name(x, "attention"), part(q, ids._replace(k=k, v=v)))
        residuals = residuals if call.by_heads else Residuals(q, k, v, out, residuals)
        return out, jax.tree.leaves((residuals, ids))

    def tangent(leaves: Any, tangents: Any) -> Any:
        with trace_context.tracing(call.context):
            part = in_part(_tangent(call), [kept_dims, keys_dims, HEADS, HEADS, HEADS], HEADS)
            return part(*residuals_and_ids.unflatten(leaves), *tangents)

    def backward(leaves: Any, dout: jax.Array) -> Any:
        with trace_context.tracing(call.context):
            part = in_part(_backward(call), [kept_dims, keys_dims, HEADS], (HEADS, HEADS, HEADS))
            return part(*residuals_and_ids.unflatten(leaves), dout)

    return both_modes(forward, tangent, backward)


def _forward(call: _Call) -> Any:
    def attention(q: jax.Array, keys: Keys) -> tuple[jax.Array, Any]:
        if call.by_heads:
            return all_to_all_attention.forward(*call.fixed, q, keys)
        if axis_size("sequence") > 1:
            out, lse = ring_attention.forward(*call.fixed, q, keys)
        else:
            mask = keys.mask_for(keys, call.causal)
            out, lse = call.implementation.forward(q, keys.k, keys.v, mask, call.scale)
        return out.astype(q.dtype), lse

    return attention


def _tangent(call: _Call) -> Any:
    """Returns the forward-mode derivative on shards: the JVP of the forward pass."""

    def attention_tangent(residuals: Residuals, ids: Keys, *tangents: jax.Array) -> Any:
        if call.by_heads:
            return all_to_all_attention.tangent(*call.fixed, residuals, ids, tangents)
        attend = lambda q, k, v: _forward(call)(q, ids._replace(k=k, v=v))[0]
        return jax.jvp(attend, residuals[:3], tangents)[1]

    return attention_tangent


def _backward(call: _Call) -> Any:
    def attention_gradient(residuals: Residuals, ids: Keys, dout: jax.Array) -> tuple[jax.Array, ...]:
        if call.by_heads:
            return all_to_all_attention.backward(*call.fixed, residuals, ids, dout)
        q, k, v, out, lse = residuals
        if axis_size("sequence") > 1:
            grads = ring_attention.backward(*call.fixed, q, ids._replace(k=k, v=v), out, lse, dout)
        else:
            mask = ids.mask_for(ids, call.causal)
            grads = call.implementation.backward(q, k, v, out, lse, dout, mask, call.scale)
        return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))

    return attention_gradient


def _keys_dims(keys: Keys) -> Any:
    one_row = keys.positions is not None and keys.positions.shape[0] == 1
    return Keys(HEADS, HEADS, ROWS, (None, "sequence") if one_row else ROWS)


def _typed_alike(context: trace_context.Context, operands: Any) -> Any:
    """Inside `shard_map`: returns the operands, all typed as varying over the axes over which any of them or the
    sequence varies."""
    varying = set().union(*(compat.varying_axes(x) for x in jax.tree.leaves(operands)))
    if context.in_manual:
        varying |= set(axes("sequence"))
    return compat.as_varying(operands, sorted(varying))


def _repeated(context: trace_context.Context, x_BSKH: jax.Array) -> jax.Array:
    """Returns key heads repeated so that they can be sharded like the query heads."""
    tensor = 1 if context.in_manual else axis_size("heads")
    num_shards = tensor * (axis_size("sequence") if context.options.attention.context == "all_to_all" else 1)
    num = x_BSKH.shape[2]
    return x_BSKH if num % num_shards == 0 else jnp.repeat(x_BSKH, math.lcm(num, num_shards) // num, axis=2)


# ---- selection of the implementation


def _implementation(
    context: trace_context.Context,
    requested: str | None,
    q: jax.Array,
    k: jax.Array,
    causal: bool,
    segments: bool,
    positions: bool,
) -> Implementation:
    """Returns the requested implementation, or with `auto` the best one for the operands on the mesh's devices. Outside
    a program the devices are unknown: `auto` is xla, and a name is not checked."""
    name = requested or context.options.attention.implementation
    key = "implementation" if requested else "attention.implementation"
    known = ("auto", *IMPLEMENTATIONS)
    if name not in known:
        raise ConfigError(f"sk.attention: {key} is {name!r}.{nearest(name, known)} Known are {', '.join(known)}.")
    device = _device(context)
    ids = tuple(what for what, is_set in (("segment ids", segments), ("positions", positions)) if is_set)
    lengths = _block_lengths(context, q.shape[1], k.shape[1])
    why = {
        "cudnn": "its gradient adds in another order each time, and deterministic is true"
        if context.options.deterministic
        else attention_cudnn.missing(device, q, lengths, ids),
        "splash": attention_splash.missing(device, q, lengths, ids),
        "xla": None,
    }
    if name == "auto":
        name = "xla" if device is None else next(n for n, reason in why.items() if reason is None)
    elif why[name]:
        raise ConfigError(
            f"sk.attention: {key} is {name}, but {why[name]}. Use auto, which selects a possible one, or xla."
        )
    if name == "splash":
        options = context.options.attention
        of_config = Tiles(options.block_q, options.block_kv, options.block_kv_compute, options.fused_backward)
        chip = chip_of_device_kind(device.device_kind, device.platform) if device is not None else None
        tiles = tiles_of(chip.name if chip else None, lengths, q.shape[3], causal, of_config)
        context.usage.tiles.add(str(tiles))
        return attention_splash.splash(tiles)
    return XLA if name == "xla" else attention_cudnn.CUDNN


def _device(context: trace_context.Context) -> Any:
    """Returns one of the mesh's devices, also for a mesh of a topology instead of this machine's devices."""
    return None if context.sharding.mesh is None else context.sharding.mesh.devices.flat[0]


def _block_lengths(context: trace_context.Context, queries: int, keys: int) -> tuple[int, int]:
    """Returns the numbers of queries and keys in one call of an implementation."""
    num = axis_size("sequence")
    if context.options.attention.context == "all_to_all":
        num = num if context.in_manual else 1
        return queries * num, keys * num
    num = 1 if context.in_manual or not is_sharded(context) else num
    parts = num if order() == "contiguous" else 2 * num
    return queries // parts, keys // parts


# ---- checks


def _check_shapes(q: Any, k: Any, v: Any, causal: bool, positions: Any, segment_ids: Any) -> None:
    shapes = f"q {q.dtype}{list(q.shape)}, k {k.dtype}{list(k.shape)}, v {v.dtype}{list(v.shape)}"
    if not (q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise ConfigError(
            f"sk.attention: {shapes}. They are q [B, T, N, H] and k, v [B, S, K, H], with the same B and H. Reshape "
            "them."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"sk.attention: {shapes}. They have one dtype. Cast them, for example k.astype(q.dtype).")
    if q.shape[2] % k.shape[2]:
        raise ConfigError(
            f"sk.attention: {shapes}. Each key head serves the same number of query heads, and {q.shape[2]} is not "
            f"divisible by {k.shape[2]}. Change the number of heads."
        )
    same_tokens = causal or positions is not None or segment_ids is not None
    if same_tokens and q.shape[1] != k.shape[1]:
        raise ConfigError(
            f"sk.attention: {shapes}. A causal mask, positions and segment ids are those of the same tokens, found "
            f"{q.shape[1]} queries and {k.shape[1]} keys. Use causal=False without ids for keys of other tokens."
        )
    for name, ids, fits in (
        ("segment_ids_BT", segment_ids, (q.shape[:2],)),
        ("positions_BT", positions, (q.shape[:2], q.shape[1:2])),
    ):
        if ids is not None and (ids.shape not in fits or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ConfigError(
                f"sk.attention: {name} is {ids.dtype}{list(ids.shape)}, and q has {q.shape[0]} x {q.shape[1]} tokens. "
                f"It needs one integer per token, int32{list(fits[0])}. Reshape or cast it."
            )
    if positions is not None and not causal:
        raise ConfigError("sk.attention: positions_BT has no effect with causal=False. Remove it.")


def _check_mesh(context: trace_context.Context, q: jax.Array, causal: bool, positions: Any) -> None:
    num, tensor = axis_size("sequence"), 1 if context.in_manual else axis_size("heads")
    is_ordered = num == 1 or order() != "zigzag" or context.usage.has_called("context_order")
    if causal and positions is None and not is_ordered:
        raise ConfigError(
            f"sk.attention: mesh.context is {num}, in zigzag order, and the model has not put its tokens into that "
            "order. A causal mask would hide the wrong keys. Call sk.context_order on tokens, targets, masks and "
            "segment ids first, and take positions from sk.context_positions; or set attention: "
            "{order: contiguous}."
        )
    unit = 1 if num == 1 else chunks(num) // (num if context.in_manual else 1)
    if q.shape[1] % unit:
        raise ConfigError(
            f"sk.attention: q has {q.shape[1]} tokens; mesh.context {num} in {order()} order cuts them into {unit} "
            f"chunks. The number of tokens is a multiple of {unit}. Try {-(-q.shape[1] // unit) * unit}."
        )
    cut = tensor * (num if context.options.attention.context == "all_to_all" else 1)
    if q.shape[2] % cut:
        ring = ", or attention: {context: ring}" if cut > tensor and q.shape[2] % tensor == 0 else ""
        by = f"mesh.tensor {tensor} x mesh.context {num}" if cut > tensor else f"mesh.tensor {tensor}"
        raise ConfigError(
            f"sk.attention: {q.shape[2]} query heads are sharded over {by} = {cut} devices, and {q.shape[2]} is not "
            f"divisible by {cut}. Change the number of heads to a multiple of {cut}{ring}, or use a smaller axis."
        )
