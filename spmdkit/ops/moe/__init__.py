"""`sk.moe`: a mixture of experts, in which each token goes through `top_k` of E experts.

    y = sum over chosen e of weight_e expert_e(x)         x[B_x, T_s, D] -> y[B_x, T_s, D]

Experts stand along the mesh axis `expert`, E / e on each device; every other layer treats that axis as data. Their
weights may be sharded over `fsdp` (dim `embed`, gathered here) and `tensor` (dim `mlp`: a column and a row product,
summed at the end). One file each: `mixture` (all of it on one device), `router` (which experts, which weight),
`capacity` and `dropless` (how tokens get there and back), `experts` (what happens there), `load` (how even it is),
`rows` (permutations with a gradient that permutes too).

    capacity=1.25   each expert takes at most C = ceil(1.25 top_k T / E) choices of an example; later ones are dropped
                    and add nothing. Static shapes, an all_to_all of the same size in each step.
    capacity=None   nothing is dropped. Work follows the load, memory has to hold the worst case.

Equal to one device: whatever decides over tokens (capacity, losses, noise) does so for one example, in the order of
`positions`, so that neither the mesh nor microbatches change who is dropped.

Wire: per device and forward pass, w bytes an element of x, b examples of this device, T tokens of a whole example, N
devices that cut the sequence (n of them do not cut experts' weights), e along `expert`, K = top_k, C_n = ceil(C / n), f
= fsdp:

    capacity    sequence   (N-1)/N (b T (D w + 8 K) + 4 P)            all_gather   x, experts, weights, P positions
                           (N-1)/N b T D w                             reduce_scatter   y
                expert     (e-1)/e b E C_n (2 D w + 4)                 all_to_all   tokens there and back, weights there
    dropless    tensor m   (m-1) b T/N (2 D w + 8 K)                   all_gather, reduce_scatter if tensor shards both
      gathered  expert     (e-1) b T_m (2 D w + 8 K)                   all_gather, reduce_scatter; T_m = m T/N
      ragged    expert     rows sent (2 D w + 4) + (e-1) 4 E           rows sent: about (e-1)/e K b T_m
    both        sequence   2 (N-1)/N b 4 (2 E + 2)                     all_reduce   of the load
                fsdp       (f-1) (bytes of this device's experts and router)      all_gather
                tensor     2 (m-1)/m b T/N D w                         all_reduce, only where x is whole along it

Backward: what leads to the experts' inputs again (all but the way back of y), the transposes of all of the forward, and
an all_reduce of the gradients of weights over axes along which they are the same: 5 passes over `expert` in all,
instead of 4 if experts' inputs were kept. Weights multiply on the expert's side, so that their gradient needs no sixth.
The TPU compiler (v5p 2x2x2, libtpu 0.0.42, 2026-11-21) sends these bytes with a capacity, within 0.6 % when dropless
and gathered; what of a ragged buffer travels is known when it runs, and a bill counts all of it.
Source: Shazeer et al. (2017), "Outrageously Large Neural Networks"; Lepikhin et al. (2020), "GShard"; Fedus et al.
(2021), "Switch Transformers"; Gale et al. (2022), "MegaBlocks"; DeepSeek-AI (2024), "DeepSeek-V3 Technical Report".

Shape suffixes: B examples, T tokens of an example, D width, E experts, K choices of a token.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.ops.collectives import axis_size
from spmdkit.ops.manual import Dims, manual
from spmdkit.ops.moe.experts import Expert, dims_of, mlp
from spmdkit.ops.moe.load import Load
from spmdkit.ops.moe.mixture import GATHERED, Mixing, Operands, dims_in, dims_out, mixture
from spmdkit.step import trace_context

__all__ = ["Load", "mlp", "moe"]


@jax.named_scope(trace_context.MOE)
def moe(
    x_BTD: jax.Array,
    router_DE: jax.Array,
    experts: Any,
    *,
    top_k: int,
    capacity: float | None = 1.25,
    expert: Expert = mlp,
    dims: Any = None,
    router_dims: Dims = (GATHERED, None),
    sequence: str | None = "norm_sequence",
    positions: jax.Array | None = None,
    where_BT: jax.Array | None = None,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalise: bool | None = None,
    priority: Literal["position", "weight"] = "position",
    bias_E: jax.Array | None = None,
    noise: float = 0.0,
    keys_B: jax.Array | None = None,
) -> tuple[jax.Array, Load]:
    """Returns the mixture of the experts' results, [B, T, D], and how even the load was, per example.

    Works in the global view and inside of `sk.manual`, where all arrays are shards.

    Args:
        x_BTD: tokens, sharded over (batch, `sequence`).
        router_DE: the router's weights, with a layout rule ["embed", null]. Zeros send every token to experts 0 ..
            top_k - 1.
        experts: weights, each with a first dim E: for `mlp` {up [E, D, F], down [E, F, D]} and, if gated, gate [E, D,
            F].
        top_k: experts of one token.
        capacity: places of an expert over the mean number of choices; None: as many as are wanted, and nothing is
            dropped.
        expert: `(weights of one expert, tokens [N, D][, product]) -> [N, D]`, each token by itself; see `moe.experts`.
        dims: names of the dims of `experts`, a tree prefix; known for `mlp`. `embed` dims arrive whole, others as
            shards.
        router_dims: names of the dims of the router. Write (None, None) where it is whole already, inside of
            `sk.manual`.
        sequence: the name of what cuts T: `norm_sequence` (context and tensor), `sequence` (context) or None.
        positions: int32 [B, T] or [T], each token's place in its example, each once; default 0 .. T - 1 in the order of
            T, or in that of `sk.context_order` if the model has called it, which costs no wire.
        where_BT: bool, False for padding: these tokens go nowhere, take no place and are in no statistic.
        score: what the weights are made of. With `sigmoid`, experts are scored one by one (DeepSeek-V3).
        normalise: divide the weights of one token by their sum; default where `top_k` is above 1.
        priority: who gets the places: tokens in order, or the largest weights first (V-MoE).
        bias_E: added to the scores that choose, not to the weights (balancing without a loss). Its gradient is zero.
        noise: standard deviation of normal noise on the logits; needs `keys_B`.
        keys_B: one random key per example, from `sk.example_keys(salt)`: so noise is the same on every mesh.

    Layout: x and y (batch, `sequence`, None); router `router_dims`; experts `dims`; load (batch,).

    Raises:
        ConfigError: arguments that do not fit each other, or experts that the mesh axis does not divide.
    """
    normalise = top_k > 1 if normalise is None else normalise
    _check(x_BTD, router_DE, top_k, capacity, score, normalise, priority, noise, keys_B)
    dims = dims_of(experts, dims)
    _check_experts(experts, dims, router_DE.shape[-1])
    keys, impl = (None, None) if keys_B is None else (jax.random.key_data(keys_B), jax.random.key_impl(keys_B))
    choices = Mixing(top_k, capacity, expert, dims, router_dims, sequence, score, normalise, priority, noise, impl)
    return _mixed(choices, Operands(x_BTD, router_DE, experts, positions, where_BT, bias_E, keys))


def _mixed(choices: Mixing, given: Operands) -> tuple[jax.Array, Load]:
    if given.positions is not None:
        given = given._replace(positions=jnp.asarray(given.positions, jnp.int32))

    def mixed(*shards: Any) -> tuple[jax.Array, Load]:
        return mixture(choices, Operands(*shards))

    found: tuple[jax.Array, Load] = manual(mixed, in_dims=dims_in(choices, given), out_dims=dims_out(choices))(*given)
    return found


# ---- what does not fit


def _check(
    x_BTD: jax.Array,
    router_DE: jax.Array,
    top_k: int,
    capacity: float | None,
    score: str,
    normalise: bool,
    priority: str,
    noise: float,
    keys_B: jax.Array | None,
) -> None:
    if x_BTD.ndim != 3 or router_DE.ndim != 2:
        raise ConfigError(
            f"sk.moe: x has shape {x_BTD.shape} and the router {router_DE.shape}. They are [examples, tokens, width] "
            "and [width, experts]. Reshape them; one token per example is a T of 1."
        )
    num_experts = router_DE.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"sk.moe: top_k is {top_k} with {num_experts} experts. A token goes to at least one expert and to each at "
            f"most once. Use a top_k from 1 to {num_experts}."
        )
    if capacity is not None and not capacity > 0:
        raise ConfigError(
            f"sk.moe: capacity is {capacity}. It is the places of an expert over its mean load, above 0. Use 1.25, or "
            "None to drop nothing."
        )
    for name, value, known in (
        ("score", score, ("softmax", "sigmoid")),
        ("priority", priority, ("position", "weight")),
    ):
        if value not in known:
            raise ConfigError(f"sk.moe: {name} is {value!r}.{nearest(value, known)} It is one of {', '.join(known)}.")
    if top_k == 1 and normalise:
        raise ConfigError(
            "sk.moe: normalise with top_k 1 makes every weight 1, and the router would learn nothing from the loss. "
            "The weights of one token are divided by their sum. Leave normalise out, or use a top_k above 1."
        )
    if capacity is None and priority != "position":
        raise ConfigError(
            f"sk.moe: priority {priority!r} has no effect without a capacity: nothing is dropped. Leave it out, or "
            "give a capacity."
        )
    if (noise > 0) != (keys_B is not None):
        found = f"noise is {noise} and keys_B is {'not given' if keys_B is None else 'given'}"
        raise ConfigError(
            f"sk.moe: {found}. Noise is drawn from one key per example, so that it is the same on every mesh. "
            "Give both, noise=0.1 and keys_B=sk.example_keys(salt), or neither (evaluation)."
        )


def _check_experts(experts: Any, dims: Any, num_experts: int) -> None:
    """Rejects weights that are not those of all experts of the router, and experts that the axis does not divide."""
    num_devices = axis_size("expert")
    in_manual = trace_context.current().in_manual
    if num_experts % num_devices:
        fits = [n for n in range(1, num_devices) if num_experts % n == 0 and num_devices % n == 0]
        raise ConfigError(
            f"sk.moe: {num_experts} experts on mesh axis expert = {num_devices}. Each device holds equally many. Use "
            f"{-(-num_experts // num_devices) * num_devices} experts, or expert: {fits[-1]} and the rest as data or "
            "fsdp."
        )
    here = num_experts // num_devices if in_manual else num_experts
    for leaf in jax.tree.leaves(experts):
        if jnp.ndim(leaf) == 0 or leaf.shape[0] != here:
            raise ConfigError(
                f"sk.moe: the router knows {num_experts} experts, a weight of experts has shape {jnp.shape(leaf)}. "
                f"Its first dim is the experts'{' of this device' if in_manual else ''}. Stack {here} experts' "
                "weights on dim 0."
            )
