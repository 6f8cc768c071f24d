"""Attention of queries over keys in plain XLA, block by block, and `merge`, which combines two such results.

    s = scale Q[T, H] . K[S, H]^T    out = softmax(s) V    lse = log sum_S exp(s)

Softmax, sums and the result are in float32; products have operands in the dtype of `q`. Beyond WHOLE queries or keys,
one loop over the unmasked pairs of blocks computes the scores of one pair at a time (online softmax). A query without
visible keys has out = 0, lse = -inf and a gradient of zero.

Every implementation of attention has this pair of functions, so that the ring can merge their results:

    forward(q_BTNH, k_BSKH, v_BSKH, mask, scale) -> out_BTNH, lse_BTN (float32)
    backward(q, k, v, out, lse, dout_BTNH, mask, scale) -> dq, dk, dv      `out`, `lse`: over all keys

Shape suffixes: B examples, T queries, S keys, N query heads, K key heads, G = N / K, H width of a head, t and s inside
one block.

Source: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021); Dao, "FlashAttention-2" (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit import compat
from spmdkit.step import trace_context

BLOCK = 512
WHOLE = 1024
"""The maximum number of queries and keys for which the scores are computed in one block."""


class Mask(NamedTuple):
    """The keys that are visible to a query: all conditions that are set must hold.

    Attributes:
        causal: key index <= query index, both counted from zero; with positions, key position <= query position.
        q_segments, k_segments: int32[B, T], int32[B, S]; must be equal.
        q_positions, k_positions: int32[B or 1, T], int32[B or 1, S].
    """

    causal: bool = False
    q_segments: Any = None
    k_segments: Any = None
    q_positions: Any = None
    k_positions: Any = None


class Keys(NamedTuple):
    """Keys and values, with optional segments and positions of their tokens."""

    k: Any
    v: Any
    segments: Any = None
    positions: Any = None

    def mask_for(self, queries: Keys, causal: bool) -> Mask:
        """Returns the mask of the tokens of `queries` over these keys."""
        return Mask(causal, queries.segments, self.segments, queries.positions, self.positions)


class Implementation(NamedTuple):
    """An implementation of attention on one device."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns (out float32[B, T, N, H], lse float32[B, T, N])."""
    cut = _Blocks(q_BTNH, k_BSKH, mask)
    if cut.is_one_on_cpu(q_BTNH):
        return _forward_on_cpu(cut, q_BTNH, k_BSKH, v_BSKH, scale)
    q_nBKGtH, k_nBKsH, v_nBKsH = cut.queries(q_BTNH), cut.keys(k_BSKH), cut.keys(v_BSKH)
    lead = q_nBKGtH.shape[:-1]
    start = (jnp.zeros(q_nBKGtH.shape, jnp.float32), jnp.full(lead, -jnp.inf), jnp.zeros(lead, jnp.float32))

    def one_pair(carry: tuple[jax.Array, ...], i: jax.Array | int, j: jax.Array | int) -> tuple[jax.Array, ...]:
        acc, top, total = (_at(x, i) for x in carry)
        s = cut.scores(_at(q_nBKGtH, i), _at(k_nBKsH, j), i, j, scale)
        new_top = jnp.maximum(top, s.max(-1))
        shift = _finite(new_top)
        p = jnp.exp(s - shift[..., None])
        keep = jnp.exp(top - shift)
        v = _at(v_nBKsH, j)
        acc = acc * keep[..., None] + _product("bkgts,bksh->bkgth", p.astype(v.dtype), v)
        new = (acc, new_top, total * keep + p.sum(-1))
        return tuple(_put(x, y, i) for x, y in zip(carry, new, strict=True))

    acc, top, total = cut.over_pairs(one_pair, start, (q_BTNH, k_BSKH, v_BSKH, mask))
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.where(total == 0, -jnp.inf, _finite(top) + jnp.log(jnp.where(total == 0, 1, total)))
    return cut.restore_queries(out), cut.restore_queries(lse[..., None])[..., 0]


def backward(
    q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, out_BTNH: Any, lse_BTN: Any, dout_BTNH: Any, mask: Mask, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dq, dk, dv) in float32; `lse` and `out` may cover more keys than these."""
    cut = _Blocks(q_BTNH, k_BSKH, mask)
    if cut.is_one_on_cpu(q_BTNH):
        return _backward_on_cpu(cut, q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BTN, dout_BTNH, scale)
    delta_BTN = (out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)).sum(-1)
    q_nBKGtH, k_nBKsH, v_nBKsH = cut.queries(q_BTNH), cut.keys(k_BSKH), cut.keys(v_BSKH)
    dout_nBKGtH = cut.queries(dout_BTNH.astype(q_BTNH.dtype))
    lse, delta = (cut.queries(x[..., None]) for x in (_finite(lse_BTN), delta_BTN))
    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_nBKGtH, k_nBKsH, v_nBKsH))

    def one_pair(carry: tuple[jax.Array, ...], i: jax.Array | int, j: jax.Array | int) -> tuple[jax.Array, ...]:
        dq, dk, dv = carry
        q, k, v, dout = _at(q_nBKGtH, i), _at(k_nBKsH, j), _at(v_nBKsH, j), _at(dout_nBKGtH, i)
        p = jnp.exp(cut.scores(q, k, i, j, scale) - _at(lse, i))
        dp = _product("bkgth,bksh->bkgts", dout, v)
        ds = (p * (dp - _at(delta, i)) * scale).astype(q.dtype)
        dq = _put(dq, _at(dq, i) + _product("bkgts,bksh->bkgth", ds, k), i)
        dk = _put(dk, _at(dk, j) + _product("bkgts,bkgth->bksh", ds, q), j)
        dv = _put(dv, _at(dv, j) + _product("bkgts,bkgth->bksh", p.astype(dout.dtype), dout), j)
        return dq, dk, dv

    operands = (q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BTN, dout_BTNH, mask)
    dq, dk, dv = cut.over_pairs(one_pair, start, operands)
    return cut.restore_queries(dq), cut.restore_keys(dk), cut.restore_keys(dv)


XLA = Implementation(forward, backward)


def product_flops(q_BTNH: jax.Array, k_BSKH: jax.Array, mask: Mask) -> float:
    """Returns the FLOPs of one product over all unmasked scores; a forward pass has two products, a gradient at least
    five."""
    return 2.0 * q_BTNH.size * k_BSKH.shape[1] * (0.5 if mask.causal else 1)


def merge(out: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) over the keys of both results: float32[..., H] and float32[...]."""
    top = _finite(jnp.maximum(lse, other_lse))
    weight, other_weight = jnp.exp(lse - top), jnp.exp(other_lse - top)
    total = weight + other_weight
    divisor = jnp.where(total == 0, 1, total)
    joined = out * (weight / divisor)[..., None] + other.astype(jnp.float32) * (other_weight / divisor)[..., None]
    return joined, jnp.where(total == 0, -jnp.inf, top + jnp.log(divisor))


# ---- one block on CPU
#
# One pair of blocks in the form that XLA's CPU backend computes fastest. One batch dim x (examples and key heads), a
# scaled query and an added mask let it fuse a product, the mask and the softmax; a `where` or the carry of the online
# softmax prevents that. dk and dv are computed as [H, S], which takes 60 % of the time of [S, H]; the barrier keeps the
# compiler from changing it back. A step of the byte GPT with 128 positions takes 305 ms instead of 328 (one core,
# jaxlib 0.10.2, 2026-11-25). r is one of the G T queries that share their keys; each sees a key.


def _forward_on_cpu(cut: _Blocks, q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, scale: float) -> tuple[jax.Array, jax.Array]:
    q_xrH, k_xSH, v_xSH = _flat(cut.queries(q_BTNH * scale)), _flat(cut.keys(k_BSKH)), _flat(cut.keys(v_BSKH))
    s_xrS = cut.scores_on_cpu(q_xrH, k_xSH)
    top_xr1 = s_xrS.max(-1, keepdims=True)
    p_xrS = jnp.exp(s_xrS - top_xr1)
    total_xr1 = p_xrS.sum(-1, keepdims=True)
    out_xrH = _batched(p_xrS, v_xSH, 2, 1) / total_xr1
    lse_xr1 = top_xr1 + jnp.log(total_xr1)
    return cut.restore_flat_queries(out_xrH), cut.restore_flat_queries(lse_xr1)[..., 0]


def _backward_on_cpu(
    cut: _Blocks, q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, out_BTNH: Any, lse_BTN: Any, dout_BTNH: Any, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries = (q_BTNH * scale, out_BTNH, lse_BTN[..., None], dout_BTNH)
    q_xrH, out_xrH, lse_xr1, dout_xrH = (_flat(cut.queries(x)) for x in queries)
    k_xSH, v_xSH = _flat(cut.keys(k_BSKH)), _flat(cut.keys(v_BSKH))
    p_xrS = jnp.exp(cut.scores_on_cpu(q_xrH, k_xSH) - lse_xr1)
    delta_xr1 = (out_xrH * dout_xrH).sum(-1, keepdims=True)
    ds_xrS = p_xrS * (_batched(dout_xrH, v_xSH, 2, 2) - delta_xr1)
    dq_xrH = _batched(ds_xrS, k_xSH, 2, 1) * scale
    dk_xHS, dv_xHS = lax.optimization_barrier((_batched(q_xrH, ds_xrS, 1, 1), _batched(dout_xrH, p_xrS, 1, 1)))
    dk, dv = (x.swapaxes(1, 2).reshape(1, -1, cut.num_kv_heads, *k_xSH.shape[1:]) for x in (dk_xHS, dv_xHS))
    return cut.restore_flat_queries(dq_xrH), cut.restore_keys(dk), cut.restore_keys(dv)


def _flat(x: jax.Array) -> jax.Array:
    """Returns [x, r or S, H] of one block of queries or keys."""
    return x.reshape(x.shape[1] * x.shape[2], -1, x.shape[-1])


def _batched(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
    """Returns the products over these dims of the matrices along dim 0, in float32."""
    return lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((0,), (0,))), preferred_element_type=jnp.float32)


# ---- blocks


class _Blocks:
    """Queries and keys split into blocks; the last block is padded with zeros."""

    def __init__(self, q_BTNH: jax.Array, k_BSKH: jax.Array, mask: Mask):
        self.T, self.S, self.mask = q_BTNH.shape[1], k_BSKH.shape[1], mask
        self.num_kv_heads = k_BSKH.shape[2]
        is_one_block = max(self.T, self.S) <= WHOLE
        self.t, self.s = (self.T, self.S) if is_one_block else (min(BLOCK, self.T), min(BLOCK, self.S))
        self.num_q, self.num_k = -(-self.T // self.t), -(-self.S // self.s)

    def queries(self, x_BTNH: jax.Array) -> jax.Array:
        """Returns [n, B, K, G, t, H]."""
        x = _fill(x_BTNH, self.num_q * self.t)
        B, _, N, H = x.shape
        x = x.reshape(B, self.num_q, self.t, self.num_kv_heads, N // self.num_kv_heads, H)
        return x.transpose(1, 0, 3, 4, 2, 5)

    def keys(self, x_BSKH: jax.Array) -> jax.Array:
        """Returns [n, B, K, s, H]."""
        x = _fill(x_BSKH, self.num_k * self.s)
        B, _, K, H = x.shape
        return x.reshape(B, self.num_k, self.s, K, H).transpose(1, 0, 3, 2, 4)

    def restore_queries(self, x: jax.Array) -> jax.Array:
        num, B, K, G, t, H = x.shape
        return x.transpose(1, 0, 4, 2, 3, 5).reshape(B, num * t, K * G, H)[:, : self.T]

    def restore_flat_queries(self, x_xrH: jax.Array) -> jax.Array:
        return self.restore_queries(
            x_xrH.reshape(1, -1, self.num_kv_heads, x_xrH.shape[1] // self.T, self.T, x_xrH.shape[2])
        )

    def restore_keys(self, x: jax.Array) -> jax.Array:
        num, B, K, s, H = x.shape
        return x.transpose(1, 0, 3, 2, 4).reshape(B, num * s, K, H)[:, : self.S]

    def over_pairs(
        self, one_pair: Callable[..., tuple[jax.Array, ...]], start: tuple[jax.Array, ...], operands: object
    ) -> Any:
        """Returns the carry of `one_pair(carry, i, j)` after all pairs of a query block and a key block that are not
        fully masked."""
        axes = sorted(set().union(*(compat.varying_axes(x) for x in jax.tree.leaves(operands) if hasattr(x, "dtype"))))
        start = compat.as_varying(start, axes)
        pairs = [(i, j) for i in range(self.num_q) for j in range(self.num_k)]
        if self.mask.causal and self.mask.q_positions is None:  # blocks above the diagonal are empty
            pairs = [(i, j) for i, j in pairs if j * self.s < (i + 1) * self.t]
        if len(pairs) == 1:
            return one_pair(start, 0, 0)
        return lax.scan(lambda carry, ij: (one_pair(carry, ij[0], ij[1]), None), start, np.array(pairs, np.int32))[0]

    def scores(self, q_BKGtH: jax.Array, k_BKsH: jax.Array, i: Any, j: Any, scale: float) -> jax.Array:
        """Returns float32[B, K, G, t, s], -inf where the mask hides the key."""
        s_BKGts = _product("bkgth,bksh->bkgts", q_BKGtH, k_BKsH) * scale
        q_index, k_index = i * self.t + jnp.arange(self.t), j * self.s + jnp.arange(self.s)
        mask, visible = self.mask, []
        if mask.causal and mask.q_positions is None:
            visible.append((q_index[:, None] >= k_index)[None])
        elif mask.causal:
            visible.append(self._rows(mask.q_positions, i)[:, :, None] >= self._columns(mask.k_positions, j)[:, None])
        if mask.q_segments is not None:
            visible.append(self._rows(mask.q_segments, i)[:, :, None] == self._columns(mask.k_segments, j)[:, None])
        if self.num_k * self.s > self.S:
            visible.append((k_index < self.S)[None, None])
        for is_seen in visible:
            s_BKGts = jnp.where(is_seen[:, None, None], s_BKGts, -jnp.inf)
        return s_BKGts

    def is_one_on_cpu(self, q: jax.Array) -> bool:
        """Returns whether all scores are one block of float32 on CPU, masked by no ids."""
        is_one_block = self.num_q == self.num_k == 1 and all(ids is None for ids in self.mask[1:])
        return is_one_block and q.dtype == jnp.float32 and trace_context.current().platform == "cpu"

    def scores_on_cpu(self, q_xrH: jax.Array, k_xSH: jax.Array) -> jax.Array:
        """Returns float32[x, r, S] of scaled queries, -inf where a causal mask hides the key."""
        s_xrS = _batched(q_xrH, k_xSH, 2, 2)
        if not self.mask.causal:
            return s_xrS
        hidden_TS = np.where(np.tri(self.T, self.S, dtype=bool), 0, -np.inf).astype(np.float32)
        return s_xrS + np.tile(hidden_TS, (q_xrH.shape[1] // self.T, 1))

    def _rows(self, x_BT: jax.Array, i: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(_fill(x_BT, self.num_q * self.t), i * self.t, self.t, axis=1)

    def _columns(self, x_BS: jax.Array, j: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(_fill(x_BS, self.num_k * self.s), j * self.s, self.s, axis=1)


def _product(how: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(how, x, y, preferred_element_type=jnp.float32)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(x == -jnp.inf, 0, x)


def _fill(x: jax.Array, length: int) -> jax.Array:
    missing = length - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def _at(x: jax.Array, i: Any) -> jax.Array:
    return x[0] if isinstance(i, int) else lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: jax.Array, value: jax.Array, i: Any) -> jax.Array:
    return value[None] if isinstance(i, int) else lax.dynamic_update_index_in_dim(x, value, i, 0)
