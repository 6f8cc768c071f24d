"""A byte-level GPT on the source files of Python's own standard library, with parameters that are a raw pytree.

The mesh in the config is all that changes between one device, mirrored, HSDP, fsdp, tensor, context, expert and pipeline
parallelism (configs/mirrored.yaml, hsdp.yaml, fsdp.yaml, tensor.yaml ...). The model names its dims once: in `rules` for the
parameters, in `BLOCK_DIMS` for what a block takes and gives. A block is one `sk.manual` part: on a mesh with model axes each
device sees its own shards in it, weights are gathered when they are used, and the collectives stand where they happen; on one
device, or mirrored, the same text runs as it is.

Shape suffixes: B examples that one call of the loss sees, T positions, D width, F hidden width of the MLP, N heads, K heads of
keys and values, H width of a head, V the vocabulary, L layers, E experts. Every product is written as 2-D x 2-D (`_product`):
on XLA's CPU backend that is about 1.5 times as fast as 3-D x 2-D (2 cores, 2026-11-20), elsewhere it makes no difference.
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
from stdlib_text import VOCAB, RandomTokens, read_files, unigram_loss, windows

import spmdkit as sk
from spmdkit.ops.collectives import all_gather, reduce_scatter

HEAD_WIDTH = 32
ROTARY_BASE = 10_000.0

Params = dict[str, Any]

__all__ = ["Shape", "apply", "read_files", "sample", "task", "unigram_loss", "windows"]


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
        stacked: layers are stacked and scanned over (short compile time at any depth, right for an accelerator); else
            separate arrays per layer (faster on CPU).
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    hidden: int = 512
    vocab: int = VOCAB
    gated: bool = False
    stacked: bool = True


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
        context: T, bytes that the model sees at once.
        dropout: probability of dropping a value after attention and after the MLP, drawn per example and position.
        scan_layers: see `Shape.stacked`.
        document_masks: True cuts every file by itself; the rest of a file is padded, and padding has no loss. So
            examples carry unequal numbers of bytes. False cuts all files as one text.
        train_bytes, eval_bytes: upper bounds on the text, to bound time and memory.
        random_tokens: True draws endless tokens from all of V in place of the text; nothing is read, for plans and timings.
    """
    heads = heads or max(1, width // HEAD_WIDTH)
    shape = Shape(width, layers, heads, kv_heads or heads, hidden or 4 * width, vocab, gated, scan_layers)

    def init(key: jax.Array) -> Params:
        return init_params(key, shape)

    def loss_fn(
        params: Params, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        tokens_BT = batch["tokens"].astype(jnp.int32)
        keys_B = sk.example_keys() if dropout and key is not None else None
        logits_BTV = apply(params, tokens_BT[:, :-1], dropout, keys_B)
        is_text_BT = jnp.arange(context) < batch["num_targets"][:, None]
        loss = sk.mean(cross_entropy(logits_BTV, tokens_BT[:, 1:]), where=is_text_BT)
        return loss, {"bits_per_byte": loss * (1 / math.log(2))}

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
}
"""Weight of a block -> logical name of each dim. Norm scales are small and stay whole."""


def rules(shape: Shape) -> list[tuple[str, list[str | None]]]:
    """Returns the layout rules: for each parameter, the logical name of every dim."""
    path, layers = ("blocks/", ["layers"]) if shape.stacked else (r"blocks/\d+/", [])
    names = [name for name in BLOCK_DIMS if "norm" not in name and (shape.gated or name != "gate")]
    blocks: list[tuple[str, list[str | None]]] = [(path + name, [*layers, *BLOCK_DIMS[name]]) for name in names]
    if shape.stacked:
        blocks.append((path + ".*_norm", ["layers", None]))
    return [("embed", ["vocab", "embed"]), *blocks, ("head", ["embed", "vocab"])]


def init_params(key: jax.Array, shape: Shape) -> Params:
    """Returns the parameters; the same numbers whether the layers are stacked or not."""
    D, F, N, K, L = shape.width, shape.hidden, shape.heads, shape.kv_heads, shape.layers
    H = D // N
    embed_key, head_key, blocks_key = jax.random.split(key, 3)

    def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape) / math.sqrt(fan_in)

    def init_block(key: jax.Array) -> Params:
        keys = jax.random.split(key, 6)
        weights = {
            "attention_norm": jnp.ones(D),
            "query": normal(keys[0], (D, N, H), D),
            "key": normal(keys[1], (D, K, H), D),
            "value": normal(keys[2], (D, K, H), D),
            "out": normal(keys[3], (N, H, D), D * 2 * L),  # 2L branches add up in the residual stream
            "mlp_norm": jnp.ones(D),
            "up": normal(keys[4], (D, F), D),
            "down": normal(keys[5], (F, D), F * 2 * L),
        }
        if shape.gated:
            weights["gate"] = normal(jax.random.fold_in(keys[4], 1), (D, F), D)
        return weights

    block_keys = jax.random.split(blocks_key, L)
    return {
        "embed": normal(embed_key, (shape.vocab, D), 1),
        "blocks": jax.vmap(init_block)(block_keys) if shape.stacked else [init_block(k) for k in block_keys],
        "norm": jnp.ones(D),
        "head": normal(head_key, (D, shape.vocab), D),
    }


# --- the model ------------------------------------------------------------------------------------------------------

STREAM = ("batch", "norm_sequence", None)
"""Dims of the residual stream between blocks: positions are cut over the context and the tensor axes, D is whole."""


def apply(params: Params, tokens_BT: jax.Array, dropout: float = 0.0, keys_B: jax.Array | None = None) -> jax.Array:
    """Returns the logits [B, T, V] of the byte after each position. Without `keys_B` nothing is dropped."""
    positions_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    embed_VD = sk.shard(params["embed"], "vocab", None)  # D whole: looked up in a cut one, x would first be replicated
    x_BTD = sk.shard(embed_VD[tokens_BT], *STREAM)

    def block(x_BTD: jax.Array, layer: jax.Array, weights: Params) -> jax.Array:
        dims = {name: BLOCK_DIMS[name] for name in weights}
        part = sk.manual(
            functools.partial(block_part, dropout=dropout),
            in_dims=[STREAM, (), dims, ("sequence",), ("norm_sequence",), ("batch",)],
            out_dims=STREAM,
        )
        return part(x_BTD, layer, weights, positions_T, positions_T, keys_B)

    block = sk.remat(block)
    if isinstance(params["blocks"], list):
        for layer, weights in enumerate(params["blocks"]):
            x_BTD = block(x_BTD, jnp.int32(layer), weights)
    else:
        num_layers = params["blocks"]["mlp_norm"].shape[0]
        layers = (jnp.arange(num_layers), params["blocks"])
        x_BTD, _ = jax.lax.scan(lambda x_BTD, layer: (block(x_BTD, *layer), None), x_BTD, layers)
    logits_BTV = _product(rms_norm(x_BTD, params["norm"]), params["head"])
    return sk.shard(logits_BTV, "batch", "sequence", "vocab")


def block_part(
    x_BTD: jax.Array,
    layer: jax.Array,
    weights: Params,
    positions_T: jax.Array,
    own_positions_T: jax.Array,
    keys_B: jax.Array | None,
    *,
    dropout: float,
) -> jax.Array:
    """Returns the residual stream after attention and MLP, on the shards of one device.

    Wire: each branch gathers x over the tensor axis on its positions and scatters its sum back; each weight is gathered
    over fsdp; attention as `sk.attention` says.
    """
    weights = {name: _whole(w, BLOCK_DIMS[name]) for name, w in weights.items()}
    keys_2B = (None, None)
    if keys_B is not None:
        keys_2B = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, layer)), out_axes=1)(keys_B)
    h_BTD = all_gather(rms_norm(x_BTD, weights["attention_norm"]), "heads", dim=1)
    h_BTD = reduce_scatter(attention(h_BTD, weights, positions_T), "heads", dim=1)
    x_BTD = x_BTD + drop(h_BTD, dropout, keys_2B[0], own_positions_T)
    h_BTD = all_gather(rms_norm(x_BTD, weights["mlp_norm"]), "mlp", dim=1)
    h_BTD = reduce_scatter(mlp(h_BTD, weights), "mlp", dim=1)
    return x_BTD + drop(h_BTD, dropout, keys_2B[1], own_positions_T)


def _whole(w: jax.Array, dims: tuple[str | None, ...]) -> jax.Array:
    """Returns a weight gathered over what cuts its `embed` dim."""
    return all_gather(w, "embed", dim=dims.index("embed")) if "embed" in dims else w


def attention(x_BTD: jax.Array, weights: Params, positions_T: jax.Array) -> jax.Array:
    """Returns causal self-attention with rotary positions over this device's heads, [B, T, D], not yet summed over heads."""
    q_BTNH, k_BTKH, v_BTKH = (_product(x_BTD, weights[name]) for name in ("query", "key", "value"))
    mixed_BTNH = dense(rotary(q_BTNH, positions_T), rotary(k_BTKH, positions_T), v_BTKH, positions_T=positions_T)
    return _product(mixed_BTNH, weights["out"], num_contracted=2)


def dense(q_BTNH, k_BTKH, v_BTKH, positions_T):
    k_BTKH, v_BTKH = (jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in (k_BTKH, v_BTKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTKH) / math.sqrt(q_BTNH.shape[-1])
    is_past_TS = positions_T[:, None] >= positions_T
    scores_BNTS = jnp.where(is_past_TS, scores_BNTS.astype(jnp.float32), -jnp.inf)
    probs_BNTS = jax.nn.softmax(scores_BNTS).astype(q_BTNH.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", probs_BNTS, v_BTKH)


def rotary(x_BTNH: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Returns `x` with each pair of channels turned by an angle that grows with the position (Su et al., 2021)."""
    half = x_BTNH.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_TH = positions_T.astype(jnp.float32)[:, None] * frequencies
    cos_TNH, sin_TNH = (f(angles_TH)[:, None, :].astype(x_BTNH.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x_BTNH[..., :half], x_BTNH[..., half:]
    return jnp.concatenate([a * cos_TNH - b * sin_TNH, a * sin_TNH + b * cos_TNH], axis=-1)


def mlp(x_BTD: jax.Array, weights: Params) -> jax.Array:
    """Returns the MLP with squared ReLU, or with SwiGLU where there is a gate, [B, T, D], not yet summed over F's shards."""
    h_BTF = _product(x_BTD, weights["up"])
    if "gate" in weights:
        h_BTF = jax.nn.silu(_product(x_BTD, weights["gate"])) * h_BTF
    else:
        h_BTF = jnp.square(jax.nn.relu(h_BTF))
    return _product(h_BTF, weights["down"])


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Returns `x` scaled to a mean square of one along D, times `scale`. The mean is in float32."""
    mean_square = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean_square + 1e-6).astype(x_BTD.dtype) * scale_D


def drop(x_BTD: jax.Array, rate: float, keys_B: jax.Array | None, positions_T: jax.Array) -> jax.Array:
    """Returns `x` with values set to zero at `rate`, drawn for each example and position: the same however both are cut."""
    if keys_B is None:
        return x_BTD
    draw = lambda key, position: jax.random.bernoulli(jax.random.fold_in(key, position), 1 - rate, x_BTD.shape[2:])
    keep_BTD = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(keys_B, positions_T)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Returns `-log softmax(logits)[target]`, [B, T], in float32, without the log-probabilities of the other bytes.

    The target's logit is taken by a masked sum, not by indexing: it fuses, and works where V is cut over devices.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    return jax.nn.logsumexp(logits_BTV, axis=-1) - jnp.sum(logits_BTV, axis=-1, where=is_target_BTV)


def _product(x: jax.Array, w: jax.Array, num_contracted: int = 1) -> jax.Array:
    """Returns the product over the last `num_contracted` dims of `x` and the first of `w`, as one 2-D x 2-D product."""
    x_dims, w_dims = x.shape[: x.ndim - num_contracted], w.shape[num_contracted:]
    y = x.reshape(math.prod(x_dims), -1) @ w.reshape(-1, math.prod(w_dims))
    return y.reshape(*x_dims, *w_dims)


# --- the trained model ----------------------------------------------------------------------------------------------


def sample(params: Params, prompt: str, num_bytes: int, context: int, temperature: float = 0.7, seed: int = 0) -> str:
    """Returns `prompt` and `num_bytes` more, drawn one at a time; the model sees the last `context` bytes each time."""

    @jax.jit
    def draw(params: Params, window_T: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits_V = apply(params, window_T[None])[0, last].astype(jnp.float32)
        return jax.random.categorical(key, logits_V / temperature)

    text = prompt.encode()
    keys = jax.random.split(jax.random.key(seed), num_bytes)
    for key in keys:
        seen = text[-context:]
        window_T = np.frombuffer(seen.ljust(context, b"\0"), np.uint8).astype(np.int32)
        text += bytes([int(draw(params, window_T, np.int32(len(seen) - 1), key))])
    return text.decode(errors="replace")
