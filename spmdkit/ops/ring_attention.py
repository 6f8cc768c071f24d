"""Attention over a sequence sharded over a ring of devices: keys and values move along the ring, queries do not.

    out[B, T_c, N, H] = softmax(q[B, T_c, N, H] . k[B, S_c, K, H]^T) v[B, S_c, K, H]          c: context, C devices

In ring step s = 1 .. C-1 each device holds the keys and values of the device s positions before it, adds their
contribution to its queries (online softmax in float32), and sends them to the next device at the same time. The
backward pass runs a second ring from `out` and `lse`; the gradients of k and v follow k and v. They are added in
float32 and sent in `precision.reduction`.

In zig-zag order (context.py) the device with chunks i and 2C-1-i receives chunks j and 2C-1-j. For j < i both its
chunks attend to chunk j; for j > i its later chunk attends to both. These are two full blocks of (T/2C)^2 out of four:
no branch, balanced work. Contiguous order takes about twice as long.

Wire, per device and call, with |x| the bytes of a shard of x:

    forward    (C-1) (|k| + |v| + |ids|)
    backward   (C-1) (|k| + |v| + |dk| + |dv| + |ids|)       dk, dv in the dtype of reduction; ids optional

When: sequences too long for one device, any number of heads. When not: fewer than about 10^3 tokens per device.
Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); Llama 3 (2024), section 3.3.2 (balanced order).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.ops.attention_blocks import Implementation, Keys, Mask, merge
from spmdkit.ops.collectives import axis_index, axis_size, ring_shift
from spmdkit.ops.context import order
from spmdkit.step import trace_context

Pair = tuple[jax.Array, jax.Array]


@jax.named_scope(trace_context.RING)
def forward(
    implementation: Implementation, causal: bool, scale: float, q: jax.Array, own: Keys
) -> tuple[jax.Array, jax.Array]:
    """Returns (out float32[B, T/C, N, H], lse float32[B, T/C, N]) of this device's queries over all keys."""
    num, index = axis_size("sequence"), axis_index("sequence")
    is_full = _is_full(causal, own)

    def add(state: Pair, passed: Keys, step: Any) -> Pair:
        source = (index - step) % num

        def full_block() -> Pair:
            mask = passed.mask_for(own, causal and not is_full)
            return merge(*state, *implementation.forward(q, passed.k, passed.v, mask, scale))

        if not causal or not is_full:
            return full_block()
        if order() == "contiguous":
            new: Pair = lax.cond(source < index, full_block, lambda: state)
            return new
        two = _ZigZagBlocks(source < index)
        mask = Mask(False, *two.segments(own, passed))
        out, lse = implementation.forward(two.queries(q), two.keys(passed.k), two.keys(passed.v), mask, scale)
        return two.merge(state, (out, lse))

    def step(carry: tuple[Keys, Pair], number: jax.Array) -> tuple[tuple[Keys, Pair], None]:
        passed, state = carry
        return (_shift(passed), add(state, passed, number)), None

    passed = _shift(own)
    out, lse = implementation.forward(q, own.k, own.v, own.mask_for(own, causal), scale)
    state = (out.astype(jnp.float32), lse)
    if num > 2:
        (passed, state), _ = lax.scan(step, (passed, state), jnp.arange(1, num - 1))
    return add(state, passed, num - 1)


@jax.named_scope(trace_context.RING)
def backward(
    implementation: Implementation, causal: bool, scale: float, q: Any, own: Keys, out: Any, lse: Any, dout: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dq, dk, dv), float32, of this device's queries, keys and values."""
    num, index = axis_size("sequence"), axis_index("sequence")
    is_full = _is_full(causal, own)
    # Without a barrier XLA merges the first step of both passes, and retains its keys and values between the passes.
    own, dout = lax.optimization_barrier((own, dout))

    def add(dq: jax.Array, passed: Keys, step: Any) -> tuple[jax.Array, Pair]:
        """Returns (dq plus the contribution of `passed`, this device's part of the gradient of its k and v)."""
        source = (index - step) % num

        def full_block() -> tuple[jax.Array, Pair]:
            mask = passed.mask_for(own, causal and not is_full)
            new, dk, dv = _float32(implementation.backward(q, passed.k, passed.v, out, lse, dout, mask, scale))
            return dq + new, (dk, dv)

        if not causal or not is_full:
            return full_block()
        if order() == "contiguous":
            skipped = lambda: (dq, (_zeros(passed.k), _zeros(passed.v)))
            grads: tuple[jax.Array, Pair] = lax.cond(source < index, full_block, skipped)
            return grads
        two = _ZigZagBlocks(source < index)
        mask = Mask(False, *two.segments(own, passed))
        k, v = two.keys(passed.k), two.keys(passed.v)
        block_grads = implementation.backward(*(two.queries(q), k, v), *map(two.queries, (out, lse, dout)), mask, scale)
        new, dk, dv = _float32(block_grads)
        return dq + two.queries_back(new), (two.keys_back(dk), two.keys_back(dv))

    def step(carry: tuple[Keys, Pair, jax.Array], number: jax.Array) -> Any:
        passed, moving, dq = carry
        following, arrived = _shift(passed), _shift_gradients(moving)
        dq, new = add(dq, passed, number)
        return (following, jax.tree.map(jnp.add, arrived, new), dq), None

    passed = _shift(own)
    dq, dk, dv = _float32(implementation.backward(q, own.k, own.v, out, lse, dout, own.mask_for(own, causal), scale))
    following = _shift(passed) if num > 2 else passed
    dq, moving = add(dq, passed, 1)
    passed = following
    if num > 3:
        (passed, moving, dq), _ = lax.scan(step, (passed, moving, dq), jnp.arange(2, num - 1))
    if num > 2:
        arrived = _shift_gradients(moving)
        dq, new = add(dq, passed, num - 1)
        moving = jax.tree.map(jnp.add, arrived, new)
    home_k, home_v = _shift_gradients(moving)
    return dq, dk + home_k, dv + home_v


def _shift(tree: Any) -> Any:
    return jax.tree.map(lambda x: ring_shift(x, "sequence"), tree)


def _shift_gradients(grads: Pair) -> Pair:
    dtype = trace_context.current().options.reduction_dtype or jnp.float32
    k, v = (ring_shift(x.astype(dtype), "sequence").astype(jnp.float32) for x in grads)
    return k, v


def _float32(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x.astype(jnp.float32) for x in arrays)


def _zeros(like: jax.Array) -> jax.Array:
    return compat.typed_like(jnp.zeros(like.shape, jnp.float32), like)


def _is_full(causal: bool, own: Keys) -> bool:
    """Returns whether the order alone determines the visible blocks of a causal mask: these blocks are then full."""
    return causal and own.positions is None


class _ZigZagBlocks:
    """The two full blocks of a device's queries and another device's keys in zig-zag order, stacked along the examples:
    the later half of the queries with the earlier half of the keys; and the earlier halves of both if the keys' device
    precedes this device, else the later halves of both."""

    def __init__(self, is_before: jax.Array):
        self.is_before = is_before

    def queries(self, x: jax.Array) -> jax.Array:
        early, late = jnp.split(x, 2, 1)
        return jnp.concatenate([late, jnp.where(self.is_before, early, late)])

    def keys(self, x: jax.Array) -> jax.Array:
        early, late = jnp.split(x, 2, 1)
        return jnp.concatenate([early, jnp.where(self.is_before, early, late)])

    def segments(self, own: Keys, passed: Keys) -> tuple[jax.Array | None, jax.Array | None]:
        if own.segments is None or passed.segments is None:
            return None, None
        return self.queries(own.segments), self.keys(passed.segments)

    def merge(self, state: Pair, block_results: Pair) -> Pair:
        """Returns the state of all queries with both blocks added."""
        early, late = (tuple(jnp.split(x, 2, 1)[i] for x in state) for i in (0, 1))
        first, second = (tuple(jnp.split(x, 2)[i] for x in block_results) for i in (0, 1))
        late = merge(*late, *first)
        pick: Callable[[jax.Array, jax.Array], jax.Array] = lambda x, y: jnp.where(self.is_before, x, y)
        joined = merge(*map(pick, early, late), *second)
        out, lse = (jnp.concatenate([pick(j, e), pick(l, j)], 1) for j, e, l in zip(joined, early, late, strict=True))
        return out, lse

    def queries_back(self, x: jax.Array) -> jax.Array:
        """Returns the sum of both blocks' values at their positions among all queries."""
        first, second = jnp.split(x, 2)
        return jnp.concatenate([self._if(second), first + self._if(second, False)], 1)

    def keys_back(self, x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2)
        return jnp.concatenate([first + self._if(second), self._if(second, False)], 1)

    def _if(self, x: jax.Array, is_before: bool = True) -> jax.Array:
        return jnp.where(self.is_before, x, 0) if is_before else jnp.where(self.is_before, 0, x)


SEAMS = {"ring_shift": ring_shift}
"""Functions that `verify` replaces (verify/mutations.py)."""
