"""GPT-2, Llama, Mistral, Qwen, Gemma, BERT and ViT as one function, to train weights of transformers on any mesh.

    task: transformer.py:task
    task_args: {config: gpt2/config.json, data: tokens.npz}
    init_from: {file: gpt2/model.safetensors, names: gpt2}

`Shape.of` reads the config.json; `names` is its `model_type`. The way back is `spmdkit checkpoint export RUN
tuned/model.safetensors --names gpt2`. The model is written for whole arrays: `rules` name the dims of the weights, XLA
inserts the collectives. `gpt.py` is the form with explicit collectives.

Shape suffixes: B examples, T positions, D width, F hidden width of the MLP, N heads, K heads of keys and values, H
width of a head, V the vocabulary or the classes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from stdlib_text import read_files, windows

import spmdkit as sk
from spmdkit.ops.tensor import product

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes and the structure of a model.

    Attributes:
        causal: False: each position attends to all (BERT, ViT).
        window: positions that the windowed layers attend to.
        windowed: for each layer, whether it has the window.
        rope: rotary positions of the layers without and with the window: base and scaling. None: learned positions.
        rms: RMS norms without biases, otherwise layer norms.
        norm_plus_one: the scale of a norm is 1 + its parameter.
        norm: position of the norms: `before` attention and MLP, `after` the sum, or on `both` sides of the branch.
        biases: weights of a layer with a bias.
        scale_embed: the embedding is multiplied by sqrt(D).
        attention_cap, logit_cap: `cap * tanh(x / cap)` of the scores and of the logits.
        attention_scale: factor of the scores.
        classes: V of a classifier of the first position; 0: logits of tokens.
        pooled: the classifier has a hidden layer.
        image, patch, channels: sizes of images; 0: tokens.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocab: int = 0
    positions: int = 0
    types: int = 0
    causal: bool = True
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    rope: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    rms: bool = True
    norm_plus_one: bool = False
    eps: float = 1e-6
    norm: str = "before"
    query_norm: bool = False
    gated: bool = True
    activation: str = "silu"
    biases: tuple[str, ...] = ()
    tied: bool = True
    scale_embed: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    attention_scale: float | None = None
    classes: int = 0
    pooled: bool = False
    image: int = 0
    patch: int = 0
    channels: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any] | Path | str, classes: int = 0) -> Shape:
        """Returns the shape of a config.json of transformers. `classes`: see `task`."""
        if not isinstance(config, Mapping):
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        kind = config["model_type"]
        families = {"gpt2": _gpt2, "bert": _encoder, "vit": _encoder}
        families |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _decoder)
        if kind not in families:
            raise ValueError(f"model_type {kind}: expected one of {', '.join(families)}.")
        classifier = {"classes": classes, "pooled": kind == "bert"} if classes else {}
        return cls(**families[kind](config) | classifier)


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    D, N = config["n_embd"], config["n_head"]
    return {
        "width": D,
        "layers": config["n_layer"],
        "heads": N,
        "kv_heads": N,
        "head_width": D // N,
        "hidden": config.get("n_inner") or 4 * D,
        "vocab": config["vocab_size"],
        "positions": config["n_positions"],
        "rms": False,
        "eps": config["layer_norm_epsilon"],
        "gated": False,
        "activation": config["activation_function"],
        "biases": ("query", "key", "value", "out", "up", "down"),
        "tied": config.get("tie_word_embeddings", True),
    }


def _encoder(config: Mapping[str, Any]) -> dict[str, Any]:
    D, N, is_image = config["hidden_size"], config["num_attention_heads"], config["model_type"] == "vit"
    qkv = ("query", "key", "value") if config.get("qkv_bias", True) else ()
    sizes = {"image": "image_size", "patch": "patch_size", "channels": "num_channels"} if is_image else {}
    if not is_image:
        sizes = {"vocab": "vocab_size", "positions": "max_position_embeddings", "types": "type_vocab_size"}
    return {
        "width": D,
        "layers": config["num_hidden_layers"],
        "heads": N,
        "kv_heads": N,
        "head_width": D // N,
        "hidden": config["intermediate_size"],
        "causal": False,
        "rms": False,
        "eps": config["layer_norm_eps"],
        "norm": "before" if is_image else "after",
        "gated": False,
        "activation": config["hidden_act"],
        "biases": (*qkv, "out", "up", "down"),
        "classes": len(config.get("id2label", "ab")) if is_image else 0,
        **{field: config[key] for field, key in sizes.items()},
    }


def _decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, D, N, L = (config[key] for key in ("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers"))
    is_gemma = kind.startswith("gemma")
    has_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    biases = ("query", "key", "value") if has_bias or kind == "qwen2" else ()
    biases += ("out",) * has_bias + ("gate", "up", "down") * mlp_bias
    scaled = config.get("query_pre_attn_scalar")
    every = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern", 6)}.get(kind)  # the last has no window
    window = config.get("sliding_window") if config.get("use_sliding_window", not kind.startswith("qwen")) else None
    types = config.get("layer_types")
    windowed = tuple(types[i] == "sliding_attention" if types else not every or (i + 1) % every > 0 for i in range(L))
    return {
        "width": D,
        "layers": L,
        "heads": N,
        "kv_heads": config.get("num_key_value_heads") or N,
        "head_width": config.get("head_dim") or D // N,
        "hidden": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "window": window,
        "windowed": windowed,
        "rope": (_rope(config, "full_attention"), _rope(config, "sliding_attention")),
        "norm_plus_one": is_gemma,
        "eps": config["rms_norm_eps"],
        "norm": "both" if kind in ("gemma2", "gemma3_text") else "before",
        "query_norm": kind in ("qwen3", "gemma3_text"),
        "activation": "gelu_pytorch_tanh" if is_gemma else config["hidden_act"],
        "biases": biases,
        "tied": config.get("tie_word_embeddings", is_gemma),
        "scale_embed": is_gemma,
        "attention_cap": config.get("attn_logit_softcapping"),
        "logit_cap": config.get("final_logit_softcapping"),
        "attention_scale": scaled and scaled**-0.5,
    }


def _rope(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """Returns the rotary positions of the layers of a type, in the form of transformers 5 or 4."""
    if given := config.get("rope_parameters"):
        return given.get(layer_type) or given
    local = config.get("rope_local_base_freq") if layer_type == "sliding_attention" else None
    scaling = {} if local else config.get("rope_scaling") or {}
    return {"rope_theta": local or config.get("rope_theta", 10_000.0), "rope_type": scaling.get("type"), **scaling}


# --- the task -------------------------------------------------------------------------------------------------------


@sk.task
def task(config: str, data: str | None = None, context: int = 128, classes: int = 0) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`.

    Args:
        config: the config.json.
        data: an .npz file with `tokens` int[examples, T + 1]; for a classifier or masked tokens `tokens` or `images`
            float[examples, height, width, channels], and `labels` int[examples] or int[examples, T], where a negative
            label is no target. Default: bytes of Python's standard library.
        context: T of the default data.
        classes: adds a classifier of the first position to BERT, or replaces that of ViT.
    """
    shape = Shape.of(config, classes)
    examples = (
        dict(np.load(data)) if data else {"tokens": windows(read_files(4_000_000, 0)[0], context, False)["tokens"]}
    )

    def loss_fn(params: Params, batch: Params, key: jax.Array | None) -> sk.Mean:
        return loss(params, batch, shape)

    init = functools.partial(init_params, shape=shape)
    optimizer = lambda learning_rate: optax.adamw(learning_rate, weight_decay=0.01)
    return sk.Task(init, loss_fn, optimizer, train_data=examples, rules=rules(shape))


def loss(params: Params, batch: Params, shape: Shape) -> sk.Mean:
    """Returns the cross entropy of the labels, or of the next tokens."""
    batch = dict(batch)
    labels = batch.pop("labels", None)
    if labels is None:
        tokens_BT = batch["tokens"].astype(jnp.int32)
        batch["tokens"], labels = tokens_BT[:, :-1], tokens_BT[:, 1:]
    if labels.ndim == 2:
        batch, labels = sk.context_order((batch, labels))
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch, shape).astype(jnp.float32), jnp.maximum(labels, 0)
    )
    return sk.mean(losses, where=labels >= 0)


# --- parameters -----------------------------------------------------------------------------------------------------


def shapes(shape: Shape) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Returns the shapes of the parameters outside of the layers, and of one layer."""
    D, F, N, K, H, V = shape.width, shape.hidden, shape.heads, shape.kv_heads, shape.head_width, shape.vocab
    layer = {"query": (D, N, H), "key": (D, K, H), "value": (D, K, H), "out": (N, H, D), "up": (D, F), "down": (F, D)}
    layer |= {"gate": (D, F)} if shape.gated else {}
    layer |= {f"{name}_bias": layer[name][2:] if name == "out" else layer[name][1:] for name in shape.biases}
    layer |= {"query_norm": (H,), "key_norm": (H,)} if shape.query_norm else {}
    norms = ["attention_norm", "mlp_norm"] + ["attention_post_norm", "mlp_post_norm"] * (shape.norm == "both")
    P = shape.patch
    top: dict[str, tuple[int, ...]] = {"embed": (V, D)}
    if shape.image:
        top = {"class_embed": (D,), "patch": (P, P, shape.channels, D), "patch_bias": (D,)}
    if shape.rope is None:
        top["position_embed"] = (shape.positions or (shape.image // P) ** 2 + 1, D)
    if shape.types:
        top |= {"type_embed": (shape.types, D)}
    if shape.pooled:
        top |= {"pooler": (D, D), "pooler_bias": (D,)}
    if shape.classes:
        top |= {"classifier": (D, shape.classes), "classifier_bias": (shape.classes,)}
    elif not shape.causal and not shape.pooled:
        top |= {"transform": (D, D), "transform_bias": (D,), "head_bias": (V,)}
    if not shape.tied:
        top["head"] = (D, V)
    outer = ["embed_norm"] if shape.norm == "after" else ["norm"]
    outer += ["transform_norm"] * ("transform" in top)
    for names, found in ((norms, layer), (outer, top)):
        found |= {name + end: (D,) for name in names for end in (("",) if shape.rms else ("", "_bias"))}
    return top, layer


def init_params(key: jax.Array, shape: Shape) -> Params:
    """Returns the parameters: weights with a standard deviation of 0.02."""

    def draw(key: jax.Array, sizes: dict[str, tuple[int, ...]]) -> Params:
        keys = dict(zip(sizes, jax.random.split(key, len(sizes)), strict=True))
        start = {name: 0.0 if name.endswith("_bias") or shape.norm_plus_one else 1.0 for name in sizes}
        return {
            name: jnp.full(size, start[name])
            if name.endswith(("_bias", "norm"))
            else 0.02 * jax.random.normal(keys[name], size)
            for name, size in sizes.items()
        }

    top, layer = shapes(shape)
    top_key, *keys = jax.random.split(key, shape.layers + 1)
    return {**draw(top_key, top), "blocks": [draw(key, layer) for key in keys]}


DIMS: dict[str, list[str | None]] = {
    "embed": ["vocab", "embed"],
    "head": ["embed", "vocab"],
    "query": ["embed", "heads", None],
    "key": ["embed", "kv_heads", None],
    "value": ["embed", "kv_heads", None],
    "out": ["heads", None, "embed"],
    "gate": ["embed", "mlp"],
    "up": ["embed", "mlp"],
    "down": ["mlp", "embed"],
    "query_bias": ["heads", None],
    "key_bias": ["kv_heads", None],
    "value_bias": ["kv_heads", None],
    "gate_bias": ["mlp"],
    "up_bias": ["mlp"],
}
"""Weight -> logical name of each dim. The others are small."""


def rules(shape: Shape) -> list[tuple[str, list[str | None]]]:
    """Returns the layout rules of the parameters. A vocabulary of an odd size, as that of GPT-2, is not sharded."""
    top, layer = shapes(shape)
    dims = DIMS if shape.vocab % 2 == 0 else DIMS | {"embed": [None, "embed"], "head": ["embed", None]}
    paths = {name: name for name in top} | {name: rf"blocks/\d+/{name}" for name in layer}
    return [(path, dims[name]) for name, path in paths.items() if name in dims]


# --- the model ------------------------------------------------------------------------------------------------------


def logits(params: Params, batch: Params, shape: Shape) -> jax.Array:
    """Returns the logits of each position, [B, T, V], or of the classes, [B, V].

    Args:
        batch: `tokens` int32[B, T] or `images` [B, height, width, channels]. Optional: `types` int32[B, T], and `mask`
            [B, T], zero at padding. On a mesh with a context axis in the order of `sk.context_order`.
    """
    x_BTD = hidden(params, batch, shape)
    if "pooler" in params:
        x_BTD = jnp.tanh(linear(x_BTD[:, :1], params, "pooler"))
    if shape.classes:
        return linear(x_BTD[:, 0], params, "classifier")
    if "transform" in params:
        x_BTD = norm(ACTIVATIONS[shape.activation](linear(x_BTD, params, "transform")), params, "transform_norm", shape)
    logits_BTV = product(x_BTD, params["head"] if "head" in params else params["embed"].T)
    if "head_bias" in params:
        logits_BTV = logits_BTV + params["head_bias"]
    return cap(logits_BTV, shape.logit_cap)


def hidden(params: Params, batch: Params, shape: Shape) -> jax.Array:
    """Returns the activations after the last norm, [B, T, D]."""
    if shape.image:
        x_BTD = embed_images(batch["images"], params, shape.patch)
    else:
        tokens_BT = batch["tokens"].astype(jnp.int32)
        x_BTD = sk.embed(tokens_BT, params["embed"]) if shape.vocab % 2 == 0 else params["embed"][tokens_BT]
    positions_T = sk.context_positions(x_BTD.shape[1])
    if shape.scale_embed:
        x_BTD = x_BTD * jnp.asarray(math.sqrt(shape.width), x_BTD.dtype)
    if "position_embed" in params:
        x_BTD = x_BTD + params["position_embed"][positions_T]
    if "type_embed" in params:
        types_BT = batch.get("types", jnp.zeros(x_BTD.shape[:2], jnp.int32))
        x_BTD = x_BTD + params["type_embed"][types_BT]
    if "embed_norm" in params:
        x_BTD = norm(x_BTD, params, "embed_norm", shape)
    ids_BT = jnp.where(batch["mask"] > 0, 0, -1) if "mask" in batch else None
    for i, weights in enumerate(params["blocks"]):
        x_BTD = sk.remat(functools.partial(block, layer=i, shape=shape))(x_BTD, weights, positions_T, ids_BT)
    return norm(x_BTD, params, "norm", shape) if "norm" in params else x_BTD


def embed_images(images_BHWC: jax.Array, params: Params, patch: int) -> jax.Array:
    """Returns a vector for the class, then one for each patch."""
    B, height, width, C = images_BHWC.shape
    tiles = images_BHWC.reshape(B, height // patch, patch, width // patch, patch, C).transpose(0, 1, 3, 2, 4, 5)
    x_BTD = product(tiles.reshape(B, -1, patch, patch, C), params["patch"], contracted=3) + params["patch_bias"]
    first_B1D = jnp.broadcast_to(params["class_embed"], (B, 1, x_BTD.shape[2]))
    return jnp.concatenate([first_B1D, x_BTD], axis=1)


def block(
    x_BTD: jax.Array, weights: Params, positions_T: jax.Array, ids_BT: jax.Array | None, *, layer: int, shape: Shape
) -> jax.Array:
    """Returns the activations after one layer."""
    for name in ("attention", "mlp"):
        h_BTD = x_BTD if shape.norm == "after" else norm(x_BTD, weights, f"{name}_norm", shape)
        h_BTD = (
            attention(h_BTD, weights, positions_T, ids_BT, layer, shape)
            if name == "attention"
            else mlp(h_BTD, weights, shape)
        )
        if shape.norm == "both":
            h_BTD = norm(h_BTD, weights, f"{name}_post_norm", shape)
        x_BTD = x_BTD + h_BTD
        if shape.norm == "after":
            x_BTD = norm(x_BTD, weights, f"{name}_norm", shape)
    return x_BTD


def attention(
    x_BTD: jax.Array, weights: Params, positions_T: jax.Array, ids_BT: jax.Array | None, layer: int, shape: Shape
) -> jax.Array:
    """Returns self-attention. `sk.attention` has no window and no cap: where one applies, the scores are a matrix."""
    q_BTNH, k_BTKH, v_BTKH = (linear(x_BTD, weights, name) for name in ("query", "key", "value"))
    if "query_norm" in weights:
        q_BTNH, k_BTKH = norm(q_BTNH, weights, "query_norm", shape), norm(k_BTKH, weights, "key_norm", shape)
    windowed = shape.window is not None and shape.windowed[layer]
    if shape.rope is not None:
        frequencies_H = frequencies(shape.rope[shape.windowed[layer]], shape.head_width)
        q_BTNH, k_BTKH = (rotary(x, positions_T, frequencies_H) for x in (q_BTNH, k_BTKH))
    window = shape.window if windowed and shape.window < x_BTD.shape[1] else None
    if window or shape.attention_cap:
        mixed_BTNH = scores_attention(q_BTNH, k_BTKH, v_BTKH, positions_T, ids_BT, window, shape)
    else:
        mixed_BTNH = sk.attention(
            q_BTNH, k_BTKH, v_BTKH, causal=shape.causal, segment_ids_BT=ids_BT, scale=shape.attention_scale
        )
    return linear(mixed_BTNH, weights, "out", contracted=2)


def scores_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    positions_T: jax.Array,
    ids_BT: jax.Array | None,
    window: int | None,
    shape: Shape,
) -> jax.Array:
    """Returns causal attention to the last `window` positions, with capped scores."""
    k_BTNH, v_BTNH = (jnp.repeat(x, shape.heads // shape.kv_heads, axis=2) for x in (k_BTKH, v_BTKH))
    scale = shape.attention_scale or 1 / math.sqrt(shape.head_width)
    scores_BNTS = cap(jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH).astype(jnp.float32) * scale, shape.attention_cap)
    distance_TS = positions_T[:, None] - positions_T[None, :]
    visible_TS = (distance_TS >= 0) & (distance_TS < (window or len(positions_T)))
    visible = visible_TS if ids_BT is None else visible_TS & (ids_BT[:, None, :, None] == ids_BT[:, None, None, :])
    weights_BNTS = jax.nn.softmax(jnp.where(visible, scores_BNTS, -jnp.inf), axis=-1).astype(v_BTNH.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BTNH)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
}


def mlp(x_BTD: jax.Array, weights: Params, shape: Shape) -> jax.Array:
    """Returns the MLP, with a gate if the layer has one."""
    h_BTF = linear(x_BTD, weights, "up")
    activation = ACTIVATIONS[shape.activation]
    h_BTF = activation(linear(x_BTD, weights, "gate")) * h_BTF if "gate" in weights else activation(h_BTF)
    return linear(h_BTF, weights, "down")


def linear(x: jax.Array, weights: Params, name: str, contracted: int = 1) -> jax.Array:
    y = product(x, weights[name], contracted)
    return y + weights[f"{name}_bias"] if f"{name}_bias" in weights else y


def norm(x: jax.Array, weights: Params, name: str, shape: Shape) -> jax.Array:
    """Returns the norm over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    if not shape.rms:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + shape.eps)
    wide = wide * (weights[name].astype(jnp.float32) + float(shape.norm_plus_one))
    return (wide if shape.rms else wide + weights[f"{name}_bias"].astype(jnp.float32)).astype(x.dtype)


def cap(x: jax.Array, limit: float | None) -> jax.Array:
    return x if limit is None else limit * jnp.tanh(x / limit)


def frequencies(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """Returns the angle per position of each pair of channels: those of Su et al. (2021), or scaled: all of them, or by
    wavelength as in Llama 3.1."""
    found = (1.0 / rope["rope_theta"] ** (np.arange(0, width, 2) / width)).astype(np.float32)
    kind, factor = rope.get("rope_type") or "default", rope.get("factor", 1.0)
    if kind == "default":
        return found
    if kind == "linear":
        return found / np.float32(factor)
    if kind != "llama3":
        raise ValueError(f"rope_type {kind}: expected default, linear or llama3.")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * found / (2 * np.pi)
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return (found * (unscaled + (1 - unscaled) / factor)).astype(np.float32)


def rotary(x_BTNH: jax.Array, positions_T: jax.Array, frequencies_H: np.ndarray) -> jax.Array:
    """Returns `x` with each pair of channels rotated by an angle proportional to the position."""
    angles_TH = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(frequencies_H)
    cos, sin = (f(angles_TH)[:, None, :].astype(x_BTNH.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
