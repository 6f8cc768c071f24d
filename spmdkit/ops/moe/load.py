"""How evenly tokens spread over experts: two losses and three statistics, each one number per example.

    fraction_e = choices of expert e / all choices            P_e = mean over tokens of the score's share
    balance = E sum_e fraction_e P_e                          1 where even; its gradient flows through P alone
    z = mean over tokens of logsumexp(logits)^2

Per example, because a product of two means is not the mean of products: computed over a batch, the loss would change
with every mesh and number of microbatches. Shards of a sequence add their sums before anything is multiplied.

Wire: one all_reduce of [B, 2 E + 2] float32 over the axes that cut the sequence.
Source: Fedus et al., "Switch Transformers" (2021), 2.2 (balance, here for top_k choices as in Lepikhin et al.,
"GShard", 2020); Zoph et al., "ST-MoE" (2022), 3 (z).

Shape suffixes: B examples, T tokens, E experts, K choices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spmdkit.ops.collectives import Names, all_reduce
from spmdkit.ops.moe.router import Routing


class Load(NamedTuple):
    """Losses and statistics of one mixture of experts, float32, for a loss such as
    `sk.mean(ce_BT + 0.01 * load.balance_B[:, None])` and metrics such as `sk.mean(load.dropped_B)`.

    Attributes:
        balance_B: the load-balancing loss, without its coefficient (0.01 is usual); 1 where even, E where one expert
            gets all.
        z_B: the router z loss, without its coefficient (0.001 is usual).
        fraction_BE: each expert's share of all choices, dropped ones too.
        max_over_mean_B: the fullest expert's load over the mean load; 1 where even.
        dropped_B: the share of choices that found no place; 0 without a capacity.
    """

    balance_B: jax.Array
    z_B: jax.Array
    fraction_BE: jax.Array
    max_over_mean_B: jax.Array
    dropped_B: jax.Array


def load_of(routing: Routing, where_BT: jax.Array | None, slots: int | None, sequence: Names) -> Load:
    """Returns the load of each example.

    Args:
        slots: places of one expert for one example; None for as many as are wanted.
        sequence: name of what cuts the tokens.
    """
    num_experts = routing.probs_BTE.shape[-1]
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    count_BE = (routing.experts_BTK[..., None] == expert_E).sum((1, 2)).astype(jnp.float32)
    z_BT = jax.nn.logsumexp(routing.logits_BTE, axis=-1) ** 2
    kept_BT = jnp.ones_like(z_BT) if where_BT is None else where_BT.astype(jnp.float32)
    prob_BE = (routing.probs_BTE * kept_BT[..., None]).sum(1)
    both_B2 = jnp.stack([(z_BT * kept_BT).sum(1), kept_BT.sum(1)], axis=1)
    sums = all_reduce(jnp.concatenate([count_BE, prob_BE, both_B2], axis=1), sequence)
    count_BE, prob_BE = sums[:, :num_experts], sums[:, num_experts : 2 * num_experts]
    z_B, tokens_B = sums[:, -2], jnp.maximum(sums[:, -1], 1.0)
    choices_B = tokens_B * routing.experts_BTK.shape[-1]
    fraction_BE = count_BE / choices_B[:, None]
    over_BE = jnp.zeros_like(count_BE) if slots is None else jnp.maximum(count_BE - slots, 0.0)
    return Load(
        balance_B=num_experts * (fraction_BE * prob_BE).sum(1) / tokens_B,
        z_B=z_B / tokens_B,
        fraction_BE=fraction_BE,
        max_over_mean_B=num_experts * fraction_BE.max(1),
        dropped_B=over_BE.sum(1) / choices_B,
    )
