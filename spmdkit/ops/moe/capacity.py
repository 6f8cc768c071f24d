"""Experts with a capacity: each takes at most C choices of an example and later choices are dropped.

    C = ceil(capacity * top_k * T / E), at most T        slot: (example, expert, index below C)

    x[B, T_c, D] -> slots[B, E, C_c, D] -> [E_e, e B, C_c, D] . W[E_e, D, F_t] . W[E_e, F_t, D] -> ... -> y[B, T_c, D]

Order of the choices of one example for one expert: all first choices before all second choices (GShard), then by
position in the example, or by weight, largest first (V-MoE). Tokens are gathered over the sequence, and a device fills
C / n slots of each expert, with n devices that shard the sequence but not the experts' weights. A gather costs less
than a sum of partly filled slots.

Wire: see `spmdkit.ops.moe`.
Source: Lepikhin et al., "GShard" (2020), 2.2; Fedus et al., "Switch Transformers" (2021), 2.2; Riquelme et al.,
"Scaling Vision with Sparse Mixture of Experts" (2021), 4, priority by weight.

Shape suffixes: B examples of this device, T tokens of a full example, D width, E experts, K choices of a token, C slots
of an expert on this device, S = E C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.ops.collectives import Names, all_gather, all_to_all, axis_index, axis_size
from spmdkit.ops.moe.experts import Expert
from spmdkit.ops.moe.router import Routing
from spmdkit.ops.moe.rows import sum_rows


def num_slots(capacity: float, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Returns C, the slots of one expert for one example."""
    return min(num_tokens, max(1, math.ceil(capacity * top_k * num_tokens / num_experts)))


def through_slots(
    x_BTD: jax.Array,
    routing: Routing,
    positions: jax.Array,
    weights: Any,
    expert: Expert,
    slots: int,
    by_weight: bool,
    sequence: tuple[str, ...],
    slot_axes: tuple[str, ...],
) -> jax.Array:
    """Returns [B, T, D], this device's partial sum of the experts' results for the tokens of full examples.

    `positions`: int32 [B, T] or [T], for the tokens of full examples. `slots`: number of slots of one expert for one
    example. `slot_axes`: the sequence axes that shard the slots.
    """
    choices, chosen_weights = all_gather(routing.experts_BTK, sequence, 1), all_gather(routing.weights_BTK, sequence, 1)
    num_experts = routing.probs_BTE.shape[-1]
    places = _slot_map(choices, chosen_weights if by_weight else None, positions, num_experts, slots, slot_axes)

    x_BSD = sum_rows(all_gather(x_BTD, sequence, 1), places.token_BS1, places.slot_BTK)
    one_each: Callable[[jax.Array], jax.Array] = lambda a_BTK: a_BTK.reshape(a_BTK.shape[0], -1, 1)
    weight_BS1 = sum_rows(one_each(chosen_weights), places.choice_BS1, one_each(places.slot_BTK))

    with jax.named_scope("moe_experts"):
        y_END = jax.vmap(expert)(weights, _to_experts(x_BSD, num_experts))
        y_END = (y_END.astype(jnp.float32) * _to_experts(weight_BS1, num_experts)).astype(x_BTD.dtype)
    return sum_rows(_from_experts(y_END, len(x_BTD), num_experts), places.slot_BTK, places.token_BS1)


class _SlotMap(NamedTuple):
    """The map between choices and slots of this device; -1 for none."""

    token_BS1: jax.Array
    choice_BS1: jax.Array
    slot_BTK: jax.Array


def _slot_map(
    experts_BTK: jax.Array,
    weights_BTK: jax.Array | None,
    positions: jax.Array,
    num_experts: int,
    slots: int,
    slot_axes: Names,
) -> _SlotMap:
    """Returns the slots of the choices, sorted by (expert, rank of the choice, [weight], position) and counted per
    expert."""
    B, T, K = experts_BTK.shape
    flat: Callable[[jax.Array], jax.Array] = lambda a: a.reshape(B, T * K)
    choice_K = jnp.arange(K, dtype=jnp.int32)
    local_slots = -(-slots // axis_size(slot_axes))
    first_slot = axis_index(slot_axes) * local_slots

    keys = [flat(experts_BTK * K + choice_K)]
    if weights_BTK is not None:
        keys.append(flat(-lax.stop_gradient(weights_BTK)))
    keys.append(flat(jnp.broadcast_to(positions[..., None], (B, T, K))))
    order_BN = lax.broadcasted_iota(jnp.int32, (B, T * K), 1)
    sorted_BN = lax.sort([*keys, order_BN], dimension=1, num_keys=len(keys), is_stable=True)[-1]
    rank_BN = jnp.argsort(sorted_BN, axis=1)

    count_BE = (flat(experts_BTK)[..., None] == jnp.arange(num_experts, dtype=jnp.int32)).sum(1, dtype=jnp.int32)
    start_BE = jnp.cumsum(count_BE, axis=1, dtype=jnp.int32) - count_BE
    number_C = first_slot + jnp.arange(local_slots, dtype=jnp.int32)
    is_full_BEC = number_C < jnp.minimum(count_BE, slots)[..., None]
    at_BS = jnp.minimum(start_BE[..., None] + number_C, T * K - 1).reshape(B, -1)
    choice_BS = jnp.where(is_full_BEC.reshape(B, -1), jnp.take_along_axis(sorted_BN, at_BS, axis=1), -1)

    expert_BN = flat(experts_BTK)
    start_BN = jnp.take_along_axis(start_BE, jnp.minimum(expert_BN, num_experts - 1), axis=1)
    number_BN = rank_BN - start_BN
    local_BN = number_BN - first_slot
    is_here_BN = (expert_BN < num_experts) & (number_BN < slots) & (local_BN >= 0) & (local_BN < local_slots)
    slot_BN = jnp.where(is_here_BN, expert_BN * local_slots + local_BN, -1)
    token_BS = jnp.where(choice_BS >= 0, choice_BS // K, -1)
    return _SlotMap(token_BS[..., None], choice_BS[..., None], slot_BN.reshape(B, T, K))


def _to_experts(x_BSD: jax.Array, num_experts: int) -> jax.Array:
    """Sends rows to the devices of their experts: [B, E C, D] -> [E / e, e B C, D]."""
    B, S, D = x_BSD.shape
    x_EBCD = x_BSD.reshape(B, num_experts, S // num_experts, D).swapaxes(0, 1)
    x_EBCD = all_to_all(x_EBCD, "expert", split_dim=0, join_dim=1)
    return x_EBCD.reshape(x_EBCD.shape[0], -1, D)


def _from_experts(y_END: jax.Array, num_examples: int, num_experts: int) -> jax.Array:
    """Sends rows back to the devices of their examples: [E / e, e B C, D] -> [B, E C, D]."""
    E, _, D = y_END.shape
    y_EBCD = y_END.reshape(E, num_examples * num_experts // E, -1, D)
    y_EBCD = all_to_all(y_EBCD, "expert", split_dim=1, join_dim=0)
    return y_EBCD.swapaxes(0, 1).reshape(num_examples, -1, D)
