"""Attention over a sharded sequence: one all-to-all moves the sharding to the heads, a second one moves it back.

    q, k, v [B, T_c, N, H] -all-to-all-> [B, T, N_c, H] -attention-> [B, T, N_c, H] -all-to-all-> [B, T_c, N, H]

Each device computes attention over full sequences for its heads, so masks, segments and kernels are the same as on one
device and the work is balanced. The residuals are sharded by heads and not sent again.

Wire, per device and call, with |x| the bytes of a shard of x and C devices:

    forward    (C-1)/C (|q| + |k| + |v| + |out|) + (C-1) |ids|
    backward   (C-1)/C (|dout| + |dq| + |dk| + |dv|) + (C-1) |ids|        ids: int32, segments and explicit positions

When: N is a multiple of tensor x context; sends C times fewer bytes than a ring for large C. When not: few key heads,
which are repeated up to one per device.
Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from spmdkit.ops.attention_blocks import Implementation, Keys, Mask
from spmdkit.ops.collectives import all_gather, all_to_all
from spmdkit.step import trace_context


class Residuals(NamedTuple):
    """The residuals of the backward pass; here full sequences and this device's heads."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


@jax.named_scope(trace_context.ALL_TO_ALL)
def forward(
    implementation: Implementation, causal: bool, scale: float, q: jax.Array, own: Keys
) -> tuple[jax.Array, Residuals]:
    """Returns (out [B, T/C, N, H], the residuals of the backward pass)."""
    q, k, v = (_to_heads(x) for x in (q, own.k, own.v))
    out, lse = implementation.forward(q, k, v, _mask(causal, own), scale)
    out = out.astype(q.dtype)
    return _to_sequence(out), Residuals(q, k, v, out, lse)


@jax.named_scope(trace_context.ALL_TO_ALL)
def tangent(
    implementation: Implementation,
    causal: bool,
    scale: float,
    saved: Residuals,
    own: Keys,
    tangents: tuple[jax.Array, ...],
) -> jax.Array:
    """Returns the tangent of `out` for tangents of q, k and v, this device's shards of the sequence; `own` as in
    `backward`."""
    attend = lambda q, k, v: implementation.forward(q, k, v, _mask(causal, own), scale)[0].astype(q.dtype)
    return _to_sequence(jax.jvp(attend, saved[:3], tuple(_to_heads(t) for t in tangents))[1])


@jax.named_scope(trace_context.ALL_TO_ALL)
def backward(
    implementation: Implementation, causal: bool, scale: float, saved: Residuals, own: Keys, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dq, dk, dv) of this device's sequence shard; only segments and positions of `own` are used."""
    grads = implementation.backward(*saved, _to_heads(dout), _mask(causal, own), scale)
    dq, dk, dv = (_to_sequence(g.astype(x.dtype)) for g, x in zip(grads, saved[:3], strict=True))
    return dq, dk, dv


def _to_heads(x: jax.Array) -> jax.Array:
    return all_to_all(x, "sequence", split_dim=2, join_dim=1)


def _to_sequence(x: jax.Array) -> jax.Array:
    return all_to_all(x, "sequence", split_dim=1, join_dim=2)


def _mask(causal: bool, own: Keys) -> Mask:
    segments, positions = (
        None if x is None else all_gather(x, "sequence", dim=1) for x in (own.segments, own.positions)
    )
    return Mask(causal, segments, segments, positions, positions)
