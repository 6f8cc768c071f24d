"""`sk.moe`: a mixture of experts, in which `top_k` of E experts process each token.

    y = sum over chosen e of weight_e expert_e(x)         x[B_x, T_s, D] -> y[B_x, T_s, D]

Experts are sharded over the mesh axis `expert`, E / e per device; all other layers use that axis as a data axis.
Weights may also be sharded over `fsdp` (dim `expert_embed` or `embed`, gathered here) and `tensor` (dim `mlp`).

    capacity=1.25   each expert takes at most C = ceil(1.25 top_k T / E) choices of an example; later ones are dropped
                    and add nothing. Static shapes, an all_to_all of the same size in each step.
    capacity=None   nothing is dropped. Work is proportional to the load; memory is sized for the worst case.

Results equal those of one device: capacity, losses and noise are computed per example, in the order of `positions`, so
that the dropped tokens do not depend on the mesh or the microbatches.

Wire: per device and forward pass, w bytes per element of x, b examples of this device, T tokens of a full example, N
devices that shard the sequence (n of them do not shard experts' weights), e along `expert`, K = top_k, C_n = ceil(C /
n), f = fsdp:

    capacity    sequence   (N-1)/N (b T (D w + 8 K) + 4 P)            all_gather   x, experts, weights, P positions
                           (N-1)/N b T D w                             reduce_scatter   y
                expert     (e-1)/e b E C_n (2 D w + 4)                 all_to_all   tokens sent and returned, weights
    dropless    tensor m   (m-1) b T/N (2 D w + 8 K)                   all_gather, reduce_scatter if tensor shards both
      gathered  expert     (e-1) b T_m (2 D w + 8 K)                   all_gather, reduce_scatter; T_m = m T/N
      ragged    expert     rows sent (2 D w + 4) + (e-1) 4 E           rows sent: about (e-1)/e K b T_m
    both        sequence   2 (N-1)/N b 4 (2 E + 2)                     all_reduce   of the load
                fsdp       (f-1) (bytes of this device's experts and router)      all_gather
                tensor     2 (m-1)/m b T/N D w                         all_reduce, only if x is replicated along it

Backward: the collectives up to the experts' inputs again (all except those that return y), the transposes of all
forward collectives, and an all_reduce of the weight gradients over axes along which weights are the same. Routing
weights are multiplied on the expert's device, so that their gradient needs no further collective.
Source: Shazeer et al. (2017), "Outrageously Large Neural Networks"; Lepikhin et al. (2020), "GShard"; Fedus et al.
(2021), "Switch Transformers"; Gale et al. (2022), "MegaBlocks"; DeepSeek-AI (2024), "DeepSeek-V3 Technical Report".

Shape suffixes: B examples, T tokens of an example, D width, E experts, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.ops import context
from spmdkit.ops.collectives import all_gather, all_reduce, axes, axis_index, axis_size, reduce_scatter
from spmdkit.ops.manual import Dims, manual
from spmdkit.ops.moe.capacity import num_slots, through_slots
from spmdkit.ops.moe.dropless import through_rows
from spmdkit.ops.moe.experts import Expert, dims_of, is_dims, mlp
from spmdkit.ops.moe.router import Load, load_of, route, token_noise
from spmdkit.ops.tensor import whole_weight
from spmdkit.step import trace_context

__all__ = ["Load", "mlp", "moe"]

GATHERED = ("embed", "expert_embed")
"""Names of the dims that are gathered before use."""


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
    router_dims: Dims = ("embed", None),
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
    """Returns the mixture of the experts' results, [B, T, D], and the load statistics per example.

    Works in the global view, and inside `sk.manual` on shards.

    Args:
        x_BTD: tokens, sharded over (batch, `sequence`).
        router_DE: the router's weights, with a layout rule ["embed", null]. Zeros send every token to experts 0 ..
            top_k - 1.
        experts: weights, each with a first dim E: for `mlp` {up [E, D, F], down [E, F, D]} and, if gated, gate [E, D,
            F].
        top_k: experts of one token.
        capacity: slots of an expert relative to the mean number of choices; None: unlimited, and nothing is dropped.
        expert: `(weights of one expert, tokens [N, D][, product]) -> [N, D]`, each token separately; see `moe.experts`.
        dims: names of the dims of `experts`, a tree prefix; has a default for `mlp`. `expert` gets `expert_embed`
            and `embed` dims gathered, other dims as shards.
        router_dims: names of the dims of the router. Use (None, None) if it is already gathered, inside `sk.manual`.
        sequence: the logical name that shards T: `norm_sequence` (context and tensor), `sequence` (context) or None.
        positions: int32 [B, T] or [T], the unique position of each token in its example; default 0 .. T - 1 in the
            order of T, or in the order of `sk.context_order` if the model calls it. The default sends nothing.
        where_BT: bool, False for padding: these tokens are not routed, use no slot and are in no statistic.
        score: function from logits to scores. `sigmoid` scores each expert independently (DeepSeek-V3).
        normalise: divide the weights of one token by their sum; default: if `top_k` is above 1.
        priority: order in which slots are filled: by token position, or largest weight first (V-MoE).
        bias_E: added to the scores for the choice, not to the weights (balancing without a loss). Its gradient is zero.
        noise: standard deviation of normal noise on the logits; needs `keys_B`.
        keys_B: one random key per example, from `sk.example_keys(salt)`, so that noise is the same on every mesh.

    Layout: x and y (batch, `sequence`, None); router `router_dims`; experts `dims`; load (batch,).

    Raises:
        ConfigError: arguments do not match each other, or the mesh axis does not divide the number of experts.
    """
    normalise = top_k > 1 if normalise is None else normalise
    _check(x_BTD, router_DE, top_k, capacity, score, normalise, priority, noise, keys_B)
    dims = dims_of(experts, dims)
    _check_experts(experts, dims, router_DE.shape[-1])
    keys, impl = (None, None) if keys_B is None else (jax.random.key_data(keys_B), jax.random.key_impl(keys_B))
    positions = None if positions is None else jnp.asarray(positions, jnp.int32)
    mixture = _Mixture(top_k, capacity, expert, dims, router_dims, sequence, score, normalise, priority, noise, impl)
    return _run(mixture, x_BTD, router_DE, experts, positions, where_BT, bias_E, keys)


def _run(
    mixture: _Mixture, x_BTD: jax.Array, router_DE: jax.Array, experts: Any, *optional: Any
) -> tuple[jax.Array, Load]:
    """Returns the results of `mixture.on_shards`; `optional`: positions, mask, bias and key data, each may be None."""
    tokens, positions = ("batch", mixture.sequence), optional[0]
    of_positions = None if positions is None else tokens[2 - positions.ndim :]
    in_dims = [(*tokens, None), mixture.router_dims, mixture.dims, of_positions, tokens, (None,), ("batch",)]
    arguments = (x_BTD, router_DE, experts, *optional)
    per_example: Any = ("batch",)
    out_dims = ((*tokens, None), Load(*[per_example] * len(Load._fields)))
    in_dims = [None if x is None else d for d, x in zip(in_dims, arguments, strict=True)]
    result: tuple[jax.Array, Load] = manual(mixture.on_shards, in_dims, out_dims, "moe")(*arguments)
    return result


class _Mixture(NamedTuple):
    """The settings of one mixture; see `sk.moe` for each field."""

    top_k: int
    capacity: float | None
    expert: Expert
    dims: Any
    router_dims: Dims
    sequence: str | None
    score: str
    normalise: bool
    priority: str
    noise: float
    key_impl: Any

    def on_shards(
        self, x_BTD: Any, router_DE: Any, experts: Any, at: Any, where_BT: Any, bias_E: Any, keys: Any
    ) -> Any:
        """Returns this device's shards of y and of the load; `at`: positions; `keys`: key data."""
        seq_axes, weight_axes = () if self.sequence is None else axes(self.sequence), _own_axes(self.dims)
        num_tokens, num_experts = x_BTD.shape[1] * axis_size(seq_axes), router_DE.shape[-1]
        order_T, differs = _order(num_tokens, seq_axes), sorted(compat.varying_axes(x_BTD))
        routing = route(
            x_BTD,
            _whole(router_DE, self.router_dims, differs),
            top_k=self.top_k,
            score=self.score,
            normalise=self.normalise,
            bias_E=bias_E,
            noise_BTE=None if keys is None else self._noise(x_BTD, order_T, seq_axes, at, keys, num_experts),
            where_BT=where_BT,
        )
        weights = jax.tree.map(lambda d, w: _whole(w, d, differs), self.dims, experts, is_leaf=is_dims)
        if self.capacity is None:
            slots, both = None, tuple(a for a in seq_axes if a in weight_axes)
            y_BTD = reduce_scatter(through_rows(x_BTD, routing, weights, self.expert, over=both), both, 1)
        else:
            slots = num_slots(self.capacity, self.top_k, num_tokens, num_experts)
            order = order_T if at is None else all_gather(at, seq_axes, at.ndim - 1)
            by_weight, slot_axes = self.priority == "weight", tuple(a for a in seq_axes if a not in weight_axes)
            y_BTD = through_slots(x_BTD, routing, order, weights, self.expert, slots, by_weight, seq_axes, slot_axes)
            y_BTD = reduce_scatter(y_BTD, seq_axes, 1)
        y_BTD = all_reduce(y_BTD, tuple(a for a in weight_axes if a not in seq_axes))
        return y_BTD, load_of(routing, where_BT, slots, seq_axes)

    def _noise(self, x_BTD: Any, order_T: Any, seq_axes: Any, at: Any, keys: Any, num_experts: int) -> jax.Array:
        """Returns noise on the logits of this device's tokens, drawn by their positions in their examples."""
        num_here = x_BTD.shape[1]
        here = lax.dynamic_slice_in_dim(order_T, axis_index(seq_axes) * num_here, num_here) if at is None else at
        return self.noise * token_noise(keys, self.key_impl, jnp.broadcast_to(here, x_BTD.shape[:2]), num_experts)


def _whole(weight: jax.Array, dims: Dims, differs: Sequence[str]) -> jax.Array:
    """Returns a weight with its `embed` dims gathered, typed as varying along `differs`, as the tokens. The type is set
    before the gather, so that the gradient is scattered first and summed along `differs` as a shard."""
    weight = compat.as_varying(weight, differs)
    for i, name in enumerate(dims):
        if name in GATHERED:
            weight = whole_weight(weight, name, i)
    return weight


def _order(num_tokens: int, seq_axes: Sequence[str]) -> jax.Array:
    """Returns int32[T]: the positions of a full sequence, in the order of `sk.context_order` if the model calls it."""
    positions_T = np.arange(num_tokens, dtype=np.int32)
    num = axis_size("sequence")
    is_reordered = trace_context.current().usage.has_called("context_order") and set(axes("sequence")) <= set(seq_axes)
    if num > 1 and is_reordered and context.order() == "zigzag":
        parts = np.split(positions_T, 2 * num)
        positions_T = np.concatenate([part for i in range(num) for part in (parts[i], parts[-1 - i])])
    return jnp.asarray(positions_T)


def _own_axes(dims: Any) -> tuple[str, ...]:
    """Returns the mesh axes that shard one expert's weights in use: results are partial sums along these axes."""
    names = {n for d in jax.tree.leaves(dims, is_leaf=is_dims) for n in d if n not in (None, *GATHERED, "expert")}
    return axes(*sorted(names))


# ---- checks


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
    """Raises ConfigError unless weights and router have the same number of experts, divisible by the mesh axis."""
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
