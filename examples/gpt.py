"""A byte-level GPT on the source files of Python's standard library, with parameters as a raw pytree.

Only the mesh in the config differs between one device, mirrored, HSDP, fsdp, tensor, context, expert and pipeline
parallelism (configs/mirrored.yaml, hsdp.yaml, fsdp.yaml, tensor.yaml ...). The model names its dims once: in `rules`
for the parameters, in `BLOCK_DIMS` for the arguments and results of a block. A block is one `sk.manual` part. On a mesh
with model axes each device sees its own shards in it, weights are gathered when they are used, and collectives are
explicit. On one device, or mirrored, the same code runs unchanged.

Shape suffixes: B examples that one call of the loss sees, T positions, D width, F hidden width of the MLP, N heads, K
heads of keys and values, H width of a head, V the vocabulary, L layers, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from stdlib_text import VOCAB, RandomTokens, read_files, unigram_loss, windows

import spmdkit as sk
from spmdkit.ops.collectives import all_gather, axis_index, axis_size, reduce_scatter
from spmdkit.ops.tensor import gather_weight, in_row_parts, product

HEAD_WIDTH = 32
ROTARY_BASE = 10_000.0

Params = dict[str, Any]

__all__ = ["Options", "Shape", "logits", "losses", "read_files", "sample", "task", "unigram_loss", "windows"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        width: D.
        layers: L.
        heads: N.
        kv_heads: K, divides N; fewer than N is grouped-query attention.
        hidden: F.
        vocab: V, at least 256.
        gated: SwiGLU MLP (three matrices) instead of squared ReLU (two).
        experts: E experts instead of each MLP; 0 for none.
        stacked: layers are stacked and scanned over (short compile time at any depth, for accelerators and pipelines);
            otherwise separate arrays per layer (faster on CPU).
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    hidden: int = 512
    vocab: int = VOCAB
    gated: bool = False
    experts: int = 0
    stacked: bool = True


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a model other than its sizes. See `task`."""

    dropout: float = 0.0
    top_k: int = 2
    capacity: float | None = None
    balance_loss: float = 0.01
    z_loss: float = 0.001
    training: bool = False


@sk.task
def task(
    width: int = 128,
    layers: int = 4,
    heads: int | None = None,
    kv_heads: int | None = None,
    hidden: int | None = None,
    vocab: int = VOCAB,
    gated: bool = False,
    context: int = 128,
    dropout: float = 0.0,
    moe: dict[str, Any] | None = None,
    scan_layers: bool = True,
    document_masks: bool = False,
    train_bytes: int = 4_000_000,
    eval_bytes: int = 65_536,
    random_tokens: bool = False,
) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`.

    Args:
        width, layers, kv_heads, hidden, vocab, gated: see `Shape`; default of `hidden` is four times the width.
        heads: N; default `width / 32`.
        context: T, bytes of an example.
        dropout: probability of dropping a value after attention and after the MLP, drawn per example and position.
        moe: experts instead of each MLP: `{experts: 8, top_k: 2, capacity: 1.25, balance_loss: 0.01, z_loss: 0.001}`;
            without a capacity nothing is dropped. See `sk.moe`.
        scan_layers: see `Shape.stacked`.
        document_masks: True splits each file separately; the rest of a file is padded, and padding has no loss. So
            examples have unequal numbers of bytes. False concatenates all files.
        train_bytes, eval_bytes: upper bounds on the text, to bound time and memory.
        random_tokens: True draws endless tokens from all of V instead of the text; nothing is read, for plans and
            timings.
    """
    heads = heads or max(1, width // HEAD_WIDTH)
    routing = dict(moe or {})
    experts = routing.pop("experts", 0)
    shape = Shape(width, layers, heads, kv_heads or heads, hidden or 4 * width, vocab, gated, experts, scan_layers)
    options = Options(dropout, **routing)

    def init(key: jax.Array) -> Params:
        return init_params(key, shape)

    def loss_fn(
        params: Params, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        tokens_BT = batch["tokens"].astype(jnp.int32)
        where_BT = jnp.arange(context) < batch["num_targets"][:, None]
        trained = dataclasses.replace(options, training=key is not None)
        return losses(params, tokens_BT[:, :-1], tokens_BT[:, 1:], where_BT, trained)

    if random_tokens:
        return sk.Task(init, loss_fn, optimizer, train_data=RandomTokens(context, vocab), rules=rules(shape))
    train_files, eval_files = read_files(train_bytes, eval_bytes)
    return sk.Task(
        init=init,
        loss_fn=loss_fn,
        optimizer=optimizer,
        train_data=windows(train_files, context, document_masks),
        eval_data=windows(eval_files, context, document_masks),
        rules=rules(shape),
    )


def optimizer(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Returns AdamW with decay on matrices only; the config's `learning_rate` is passed in."""

    def is_matrix(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

    return optax.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=is_matrix)


# --- parameters -----------------------------------------------------------------------------------------------------

BLOCK_DIMS: dict[str, tuple[str | None, ...]] = {
    "attention_norm": (None,),
    "query": ("embed", "heads", None),
    "key": ("embed", "kv_heads", None),
    "value": ("embed", "kv_heads", None),
    "out": ("heads", None, "embed"),
    "mlp_norm": (None,),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "router": ("embed", None),
    "expert_gate": ("expert", "expert_embed", "mlp"),
    "expert_up": ("expert", "expert_embed", "mlp"),
    "expert_down": ("expert", "mlp", "expert_embed"),
}
"""Weight of a block -> logical name of each dim. Norm scales are small and replicated."""
DENSE = ("query", "key", "value", "out", "gate", "up", "down")
"""Weights with products in float8 under `precision: {matmul: float8}`."""


def rules(shape: Shape) -> list[tuple[str, list[str | None]]]:
    """Returns the layout rules: for each parameter, the logical name of every dim."""
    path, layers = ("blocks/", ["layers"]) if shape.stacked else (r"blocks/\d+/", [])
    weights = jax.eval_shape(lambda key: init_block(key, shape), jax.random.key(0))
    blocks = [(path + name, [*layers, *BLOCK_DIMS[name]]) for name in weights]
    return [("embed", ["vocab", "embed"]), *blocks, ("head", ["embed", "vocab"])]


def init_params(key: jax.Array, shape: Shape) -> Params:
    """Returns the parameters; the numbers do not depend on whether the layers are stacked."""
    D, V = shape.width, shape.vocab
    embed_key, head_key, blocks_key = jax.random.split(key, 3)
    keys = jax.random.split(blocks_key, shape.layers)
    one = functools.partial(init_block, shape=shape)
    return {
        "embed": _normal(embed_key, (V, D), 1),
        "blocks": jax.vmap(one)(keys) if shape.stacked else [one(key) for key in keys],
        "norm": jnp.ones(D),
        "head": _normal(head_key, (D, V), D),
    }


def init_block(key: jax.Array, shape: Shape) -> Params:
    """Returns the parameters of one layer. The 2 L branches add up in the residual stream, so each starts smaller."""
    D, F, N, K, L, E = shape.width, shape.hidden, shape.heads, shape.kv_heads, shape.layers, shape.experts
    H = D // N
    keys = jax.random.split(key, 6)
    weights = {
        "attention_norm": jnp.ones(D),
        "query": _normal(keys[0], (D, N, H), D),
        "key": _normal(keys[1], (D, K, H), D),
        "value": _normal(keys[2], (D, K, H), D),
        "out": _normal(keys[3], (N, H, D), D * 2 * L),
        "mlp_norm": jnp.ones(D),
    }
    if E:
        weights["router"] = _normal(jax.random.fold_in(key, 1), (D, E), D)
    prefix, experts = ("expert_", (E,)) if E else ("", ())
    weights[prefix + "up"] = _normal(keys[4], (*experts, D, F), D)
    weights[prefix + "down"] = _normal(keys[5], (*experts, F, D), F * 2 * L)
    if shape.gated:
        weights[prefix + "gate"] = _normal(jax.random.fold_in(keys[4], 1), (*experts, D, F), D)
    products = {name: w for name, w in weights.items() if name in DENSE}
    return weights | sk.float8_histories(products)


def _normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    return jax.random.normal(key, shape) / math.sqrt(fan_in)


# --- the model ------------------------------------------------------------------------------------------------------

STREAM = ("batch", "norm_sequence", None)
"""Dims of the residual stream between blocks: positions are sharded over the context and the tensor axes, D is not."""

State = dict[str, jax.Array]
"""The activations between blocks: `x`, and with experts the sums over layers of their load, one value per example."""


def losses(
    params: Params, tokens_BT: jax.Array, targets_BT: jax.Array, where_BT: jax.Array, options: Options
) -> tuple[sk.Mean, dict[str, sk.Mean]]:
    """Returns (loss in nats per byte, metrics). Every mean is over the target bytes."""
    rows = sk.context_order({"tokens": tokens_BT, "targets": targets_BT, "where": where_BT})
    num_layers, with_experts = count_layers(params["blocks"])
    has_dropout = options.dropout > 0 and options.training

    def first(embed_VD: jax.Array, rows: Any) -> State:
        return embed(embed_VD, rows["tokens"], with_experts)

    def layer(state: State, weights: Any, rows: Any) -> State:  # the pipeline folds the layer's number into the keys
        return block(state, weights, sk.example_keys() if has_dropout else None, options)

    def last(state: State, weights: Any, rows: Any) -> Any:
        h_BTD = rms_norm(state["x"], weights["norm"])
        loss_BT = sk.cross_entropy(h_BTD, weights["head"], rows["targets"], where=rows["where"])
        return means(loss_BT, rows["where"], state, num_layers, options)

    ends = {name: params[name] for name in ("norm", "head")}
    if not isinstance(params["blocks"], list):
        return sk.pipeline(first, layer, last, head_per_token=not with_experts)(
            params["embed"], params["blocks"], ends, rows
        )
    state = first(params["embed"], rows)
    for i, weights in enumerate(params["blocks"]):
        keys_B = sk.example_keys(i) if has_dropout else None
        state = sk.remat(functools.partial(block, options=options))(state, weights, keys_B)
    return last(state, ends, rows)


def means(
    loss_BT: jax.Array, where_BT: jax.Array, state: State, num_layers: int, options: Options
) -> tuple[sk.Mean, dict[str, sk.Mean]]:
    """Returns the loss with the experts' balance losses, weighted by the bytes of each example, and metrics."""
    plain = sk.mean(loss_BT, where=where_BT)
    metrics = {"bits_per_byte": plain * (1 / math.log(2))}
    if "balance" not in state:
        return plain, metrics
    load = {name: state[name] / num_layers for name in ("balance", "z", "dropped")}
    extra_B = options.balance_loss * load["balance"] + options.z_loss * load["z"]
    metrics |= {name: sk.mean(x_B) for name, x_B in load.items()}
    return sk.mean(loss_BT + extra_B[:, None], where=where_BT), metrics


def logits(params: Params, tokens_BT: jax.Array, options: Options) -> jax.Array:
    """Returns the logits [B, T, V] of the byte after each position, on one device."""
    blocks = params["blocks"]
    num_layers, with_experts = count_layers(blocks)
    state = embed(params["embed"], tokens_BT, with_experts)
    for i in range(num_layers):
        weights = blocks[i] if isinstance(blocks, list) else jax.tree.map(lambda w, i=i: w[i], blocks)
        state = block(state, weights, None, options)
    return product(rms_norm(state["x"], params["norm"]), params["head"])


def count_layers(blocks: Any) -> tuple[int, bool]:
    """Returns (number of layers, whether they have experts)."""
    if isinstance(blocks, list):
        return len(blocks), "router" in blocks[0]
    return blocks["mlp_norm"].shape[0], "router" in blocks


def embed(embed_VD: jax.Array, tokens_BT: jax.Array, with_experts: bool) -> State:
    """Returns the input of the first block."""
    state = {"x": sk.embed(tokens_BT, embed_VD)}
    if with_experts:
        state |= {name: jnp.zeros(len(tokens_BT)) for name in ("balance", "z", "dropped")}
    return state


def block(state: State, weights: Params, keys_B: jax.Array | None, options: Options) -> State:
    """Returns the activations after one layer, attention and MLP: one part in which each device sees its shards.

    Args:
        keys_B: random keys of this layer, one per example, for dropout; None: no dropout.
    """
    state_dims = {name: STREAM if name == "x" else ("batch",) for name in state}
    dims = [state_dims, {name: BLOCK_DIMS.get(name, ()) for name in weights}, ("batch",)]
    part = sk.manual(functools.partial(block_part, options=options), in_dims=dims, out_dims=state_dims)
    return part(state, weights, keys_B)


def block_part(state: State, weights: Params, keys_B: jax.Array | None, *, options: Options) -> State:
    """Returns the activations after attention and MLP, on the shards of one device.

    Wire: each branch gathers x over the tensor axis on its positions and scatters its sum back; each weight is gathered
    over fsdp; attention and experts: see `sk.attention` and `sk.moe`.
    """
    x_BTD = state["x"]
    weights = weights | {name: _whole(weights[name], BLOCK_DIMS[name], x_BTD) for name in DENSE if name in weights}
    positions_T = sk.context_positions(x_BTD.shape[1] * axis_size("norm_sequence"))
    layer = lambda rows: branches(*rows, weights, positions_T, options)
    if "router" in weights:  # `sk.moe` gathers the experts' weights itself: once, not for each part
        return layer((state, keys_B))
    return in_row_parts(layer, (state, keys_B), tokens=len(positions_T))


def branches(state: State, keys_B: jax.Array | None, weights: Params, positions_T: Any, options: Options) -> State:
    """Returns the activations after attention and MLP, from weights gathered over fsdp."""
    x_BTD = state["x"]
    own_T = jax.lax.dynamic_slice_in_dim(positions_T, axis_index("heads") * x_BTD.shape[1], x_BTD.shape[1])
    keys_2B = (None, None)
    if keys_B is not None:
        keys_2B = jax.vmap(jax.random.split, out_axes=1)(keys_B)
    h_BTD = all_gather(rms_norm(x_BTD, weights["attention_norm"]), "heads", dim=1)
    h_BTD = checkpoint_name(reduce_scatter(attention(h_BTD, weights, positions_T), "heads", dim=1), "out_proj")
    x_BTD = x_BTD + drop(h_BTD, options.dropout, keys_2B[0], own_T)
    h_BTD = rms_norm(x_BTD, weights["mlp_norm"])
    if "router" in weights:
        h_BTD, state = mixture(h_BTD, weights, own_T, state, options)
    else:
        h_BTD = checkpoint_name(reduce_scatter(mlp(all_gather(h_BTD, "mlp", dim=1), weights), "mlp", dim=1), "mlpwo")
    return state | {"x": x_BTD + drop(h_BTD, options.dropout, keys_2B[1], own_T)}


def _whole(w: jax.Array, dims: tuple[str | None, ...], x: jax.Array) -> jax.Array:
    """Returns a weight gathered over the axes that shard its `embed` dim."""
    return gather_weight(w, dims, STREAM, dims.index("embed"), x) if "embed" in dims else w


def attention(x_BTD: jax.Array, weights: Params, positions_T: jax.Array | np.ndarray) -> jax.Array:
    """Returns causal self-attention with rotary positions over this device's heads, [B, T, D], not yet summed over
    heads."""
    projected = lambda name: checkpoint_name(weighted(x_BTD, weights, name), f"{name}_proj")
    q_BTNH, k_BTKH, v_BTKH = (projected(name) for name in ("query", "key", "value"))
    mixed_BTNH = sk.attention(rotary(q_BTNH, positions_T), rotary(k_BTKH, positions_T), v_BTKH)
    return weighted(mixed_BTNH, weights, "out", contracted=2)


def weighted(x: jax.Array, weights: Params, name: str, contracted: int = 1) -> jax.Array:
    """Returns the product of `x` and a weight, in float8 if the weight has a history."""
    return product(x, weights[name], contracted, weights.get("float8", {}).get(name))


def mixture(
    x_BTD: jax.Array, weights: Params, positions_T: jax.Array, state: State, options: Options
) -> tuple[jax.Array, State]:
    """Returns (the result of the mixture of experts, [B, T, D], the activations with the load of this layer added)."""
    experts = {name: weights[f"expert_{name}"] for name in ("gate", "up", "down") if f"expert_{name}" in weights}
    y_BTD, load = sk.moe(
        x_BTD,
        weights["router"],
        experts,
        top_k=options.top_k,
        capacity=options.capacity,
        positions=positions_T,
    )
    added = {"balance": load.balance_B, "z": load.z_B, "dropped": load.dropped_B}
    return y_BTD, state | {name: state[name] + x_B for name, x_B in added.items()}


def rotary(x_BTNH: jax.Array, positions_T: jax.Array | np.ndarray) -> jax.Array:
    """Returns `x` with each pair of channels rotated by an angle proportional to the position (Su et al., 2021)."""
    half = x_BTNH.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-np.arange(half, dtype=np.float32) / half)
    # A NumPy array like the positions: XLA on CPU computes traced angles for each example and head.
    angles_TH = positions_T.astype(np.float32)[:, None] * frequencies
    cos_TNH, sin_TNH = (f(angles_TH)[:, None, :].astype(x_BTNH.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x_BTNH[..., :half], x_BTNH[..., half:]
    return jnp.concatenate([a * cos_TNH - b * sin_TNH, a * sin_TNH + b * cos_TNH], axis=-1)


def mlp(x_BTD: jax.Array, weights: Params) -> jax.Array:
    """Returns the MLP with squared ReLU, or with SwiGLU if there is a gate, [B, T, D], not yet summed over F's shards.

    Its products are named for `remat: {save: [hidden]}` or `{offload: [hidden]}`.
    """
    h_BTF = checkpoint_name(weighted(x_BTD, weights, "up"), "hidden")
    if "gate" in weights:
        h_BTF = jax.nn.silu(checkpoint_name(weighted(x_BTD, weights, "gate"), "hidden")) * h_BTF
    else:
        h_BTF = jnp.square(jax.nn.relu(h_BTF))
    return weighted(h_BTF, weights, "down")


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Returns `x` scaled to a mean square of one along D, times `scale`. The mean is in float32."""
    mean_square = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean_square + 1e-6).astype(x_BTD.dtype) * scale_D


def drop(x_BTD: jax.Array, rate: float, keys_B: jax.Array | None, positions_T: jax.Array) -> jax.Array:
    """Returns `x` with values set to zero at `rate`, drawn for each example and position: the same for any sharding of
    both."""
    if keys_B is None:
        return x_BTD
    draw = lambda key, position: jax.random.bernoulli(jax.random.fold_in(key, position), 1 - rate, x_BTD.shape[2:])
    keep_BTD = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(keys_B, positions_T)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


# --- the trained model ----------------------------------------------------------------------------------------------


def sample(
    params: Params, prompt: str, num_bytes: int, context: int, temperature: float = 0.7, options: Options = Options()
) -> str:
    """Returns `prompt` and `num_bytes` more, drawn one at a time; the model sees the last `context` bytes each time."""

    @jax.jit
    def draw(params: Params, window_T: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits_V = logits(params, window_T[None], options)[0, last].astype(jnp.float32)
        return jax.random.categorical(key, logits_V / temperature)

    text = prompt.encode()
    keys = jax.random.split(jax.random.key(0), num_bytes)
    for key in keys:
        seen = text[-context:]
        window_T = np.frombuffer(seen.ljust(context, b"\0"), np.uint8).astype(np.int32)
        text += bytes([int(draw(params, window_T, np.int32(len(seen) - 1), key))])
    return text.decode(errors="replace")
