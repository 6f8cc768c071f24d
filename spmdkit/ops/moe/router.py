"""The router: the experts of each token, their weights, and the load statistics. All in float32.

    logits = x . router + noise        scores = softmax(logits)  or  sigmoid(logits)
    chosen = the top_k of scores + bias, ties by the lower expert
    weight = score of the chosen expert, divided by the sum of the chosen scores if `normalise`

    fraction_e = choices of expert e / all choices            P_e = mean over tokens of the score's share
    balance = E sum_e fraction_e P_e                          1 if balanced; only P has a gradient
    z = mean over tokens of logsumexp(logits)^2

Each token is routed separately, so only the last bit of the product depends on the mesh. The load is computed per
example: a product of two means over a batch would change with the mesh and the number of microbatches.

Wire: one all_reduce of [B, 2 E + 2] float32 for the load, over the axes that shard the sequence.
Source: Shazeer et al., "Outrageously Large Neural Networks" (2017), top-k gating and noise; Fedus et al., "Switch
Transformers" (2021), selective float32; DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.1.2, sigmoid scores and
the bias for the choice only.

Shape suffixes: B examples, T tokens of an example, D width, E experts, K experts of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.ops.collectives import Names, all_reduce


class Routing(NamedTuple):
    """The routing of tokens.

    Attributes:
        experts_BTK: int32, the chosen experts, highest score first; E for padding tokens.
        weights_BTK: float32, the factor of each expert's result.
        probs_BTE: float32, scores normalized to a sum of one, for the balance loss.
        logits_BTE: float32, before noise.
    """

    experts_BTK: jax.Array
    weights_BTK: jax.Array
    probs_BTE: jax.Array
    logits_BTE: jax.Array


def route(
    x_BTD: jax.Array,
    router_DE: jax.Array,
    *,
    top_k: int,
    score: str,
    normalise: bool,
    bias_E: jax.Array | None = None,
    noise_BTE: jax.Array | None = None,
    where_BT: jax.Array | None = None,
) -> Routing:
    """Returns the routing of each token; tokens masked by `where` are not routed."""
    logits_BTE = lax.dot_general(
        x_BTD.astype(jnp.float32),
        router_DE.astype(jnp.float32),
        (((2,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,  # one bfloat16 pass, a TPU's default, would change near ties
    )
    noisy_BTE = logits_BTE if noise_BTE is None else logits_BTE + noise_BTE
    if score == "softmax":
        scores_BTE = jax.nn.softmax(noisy_BTE, axis=-1)
        probs_BTE = scores_BTE
    else:
        scores_BTE = jax.nn.sigmoid(noisy_BTE)
        probs_BTE = scores_BTE / scores_BTE.sum(-1, keepdims=True)
    chooses_BTE = scores_BTE if bias_E is None else scores_BTE + bias_E.astype(jnp.float32)
    _, experts_BTK = lax.top_k(lax.stop_gradient(chooses_BTE), top_k)
    is_chosen_BTKE = experts_BTK[..., None] == jnp.arange(router_DE.shape[1], dtype=jnp.int32)
    weights_BTK = jnp.sum(scores_BTE[:, :, None, :], axis=-1, where=is_chosen_BTKE)
    if normalise:
        weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdims=True)
    if where_BT is not None:
        experts_BTK = jnp.where(where_BT[..., None], experts_BTK, router_DE.shape[1])
        weights_BTK = jnp.where(where_BT[..., None], weights_BTK, 0.0)
    return Routing(experts_BTK.astype(jnp.int32), weights_BTK, probs_BTE, logits_BTE)


def token_noise(keys_B: jax.Array, impl: Any, positions_BT: jax.Array, num_experts: int) -> jax.Array:
    """Returns standard normal noise [B, T, E], drawn from (key of the example, position of the token): the same on
    every mesh. `keys_B` is key data, `impl` the `jax.random.key_impl` of the keys."""
    draw: Callable[[Any, Any], jax.Array] = lambda key, position: jax.random.normal(
        jax.random.fold_in(key, position), (num_experts,), jnp.float32
    )
    return jax.vmap(jax.vmap(draw, (None, 0)))(jax.random.wrap_key_data(keys_B, impl=impl), positions_BT)


class Load(NamedTuple):
    """Losses and statistics of one mixture of experts, float32, for a loss such as
    `sk.mean(ce_BT + 0.01 * load.balance_B[:, None])` and metrics such as `sk.mean(load.dropped_B)`.

    Attributes:
        balance_B: the load-balancing loss, without its coefficient (0.01 is usual); 1 if balanced, E if one expert gets
            all tokens.
        z_B: the router z loss, without its coefficient (0.001 is usual).
        fraction_BE: each expert's share of all choices, including dropped ones.
        max_over_mean_B: the largest expert load divided by the mean load; 1 if balanced.
        dropped_B: the fraction of dropped choices; 0 without a capacity.
    """

    balance_B: jax.Array
    z_B: jax.Array
    fraction_BE: jax.Array
    max_over_mean_B: jax.Array
    dropped_B: jax.Array


def load_of(routing: Routing, where_BT: jax.Array | None, slots: int | None, sequence: Names) -> Load:
    """Returns the load of each example; `slots`: slots of one expert for one example, `sequence`: axes that shard the
    tokens."""
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
