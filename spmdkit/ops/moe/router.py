"""The router: which experts each token goes to, and with which weight. All of it in float32.

    logits = x . router + noise        scores = softmax(logits)  or  sigmoid(logits)
    chosen = the top_k of scores + bias, equal ones by the lower expert
    weight = score of the chosen one, divided by the sum of the chosen ones' where `normalise`

A token is routed by itself, so nothing here depends on the mesh but the last bit of the product.

Wire: none.
Source: Shazeer et al., "Outrageously Large Neural Networks" (2017), top-k gating and noise; Fedus et al., "Switch
Transformers" (2021), selective float32; DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.1.2, sigmoid scores and
the bias that chooses without weighing.

Shape suffixes: B examples, T tokens of an example, D width, E experts, K experts of one token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts_BTK: int32, the chosen experts, the best first; E for a token that is padding.
        weights_BTK: float32, what each expert's result is multiplied by.
        probs_BTE: float32, scores that add up to one, for the balance loss.
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
    """Returns where each token goes; tokens that `where` leaves out go nowhere."""
    logits_BTE = lax.dot_general(
        x_BTD.astype(jnp.float32),
        router_DE.astype(jnp.float32),
        (((2,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,  # one bfloat16 pass, a TPU's default, would turn near ties over
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
    every mesh.

    Args:
        keys_B: uint32[B, ...], `jax.random.key_data` of one key per example.
        impl: `jax.random.key_impl` of the keys.
    """
    draw = lambda key, position: jax.random.normal(jax.random.fold_in(key, position), (num_experts,), jnp.float32)
    return jax.vmap(jax.vmap(draw, (None, 0)))(jax.random.wrap_key_data(keys_B, impl=impl), positions_BT)
