"""A byte-level GPT on the source files of Python's own standard library, with parameters that are a raw pytree.

The mesh in the config is all that changes between one device, mirrored, HSDP, fsdp and tensor parallelism
(configs/mirrored.yaml, hsdp.yaml, fsdp.yaml, tensor.yaml ...): the model names its dims once, in `rules` for the
parameters and in `sk.shard` for the activations, and the layout table of the run says which mesh axis cuts them.

Shape suffixes: B examples that one call of the loss sees, T positions, S positions attended to, D width, F hidden width of
the MLP, N heads, K heads of keys and values, H width of a head, V the 256 bytes, L layers. Every product is written as 2-D x 2-D (`_product`):
on XLA's CPU backend that is about 1.5 times as fast as 3-D x 2-D (2 cores, 2026-11-20), elsewhere it makes no difference.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

VOCAB = 256
HEAD_WIDTH = 32
ROTARY_BASE = 10_000.0
NOT_TRAINED_ON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders that differ between installations, or that hold tables and not code."""

Params = dict[str, Any]


def task(
    width: int = 128,
    layers: int = 4,
    heads: int | None = None,
    context: int = 128,
    dropout: float = 0.0,
    scan_layers: bool = True,
    document_masks: bool = False,
    train_bytes: int = 4_000_000,
    eval_bytes: int = 65_536,
    hidden: int | None = None,
    kv_heads: int | None = None,
    vocab: int = VOCAB,
    random_tokens: bool = False,
) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`.

    Args:
        width: D; a multiple of `heads`.
        heads: N; default `width / 32`.
        context: T, bytes that the model sees at once.
        dropout: probability of dropping a value after attention and after the MLP, drawn per example.
        scan_layers: True stacks the layers and scans over them (short compile time at any depth, right for an
            accelerator); False keeps separate arrays per layer (faster on CPU).
        document_masks: True cuts every file by itself; the rest of a file is padded, and padding has no loss. So
            examples carry unequal numbers of bytes. False cuts all files as one text.
        train_bytes, eval_bytes: upper bounds on the text, to bound time and memory.
        hidden: F; default `4 * width`.
        kv_heads: K, heads of keys and values, each shared by N / K queries (Ainslie et al., 2023); default `heads`.
        vocab: V, at least 256; more than the text needs, for the shape of a model that is planned and not trained here.
        random_tokens: True draws endless tokens from all of V in place of the text; nothing is read, for plans and timings.
    """
    heads = heads or max(1, width // HEAD_WIDTH)

    def init(key: jax.Array) -> Params:
        return init_params(
            key, width, layers, heads, stacked=scan_layers, hidden=hidden, kv_heads=kv_heads, vocab=vocab
        )

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
        data = RandomTokens(context, vocab)
        return sk.Task(init, loss_fn, optimizer, train_data=data, rules=rules(stacked=scan_layers))
    train_files, eval_files = read_files(train_bytes, eval_bytes)
    return sk.Task(
        init=init,
        loss_fn=loss_fn,
        optimizer=optimizer,
        train_data=windows(train_files, context, document_masks),
        eval_data=windows(eval_files, context, document_masks),
        rules=rules(stacked=scan_layers),
    )


def optimizer(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Returns AdamW with decay on matrices only; the config's `learning_rate` is passed in."""

    def is_matrix(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

    return optax.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=is_matrix)


# --- the text -------------------------------------------------------------------------------------------------------


def read_files(train_bytes: int, eval_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the files to train on and the files to evaluate on, each cut off at its number of bytes.

    A file's place in the order and its side of the split come from a hash of its path: nothing depends on the order in
    which the file system lists them, and both sides see all parts of the library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(library) for path in library.rglob("*.py")]
    names = [name for name in names if not NOT_TRAINED_ON.intersection(name.parts)]
    hashes = {name: hashlib.sha256(name.as_posix().encode()).digest() for name in names}
    names.sort(key=hashes.__getitem__)
    eval_names = [name for name in names if hashes[name][-1] < 26]  # a tenth of them
    train_names = [name for name in names if hashes[name][-1] >= 26]
    return _read(library, train_names, train_bytes), _read(library, eval_names, eval_bytes)


def _read(library: Path, names: Iterable[Path], max_bytes: int) -> list[bytes]:
    files: list[bytes] = []
    for name in names:
        left = max_bytes - sum(map(len, files))
        if left <= 1:
            break
        files.append((library / name).read_bytes()[:left])
    return files


def windows(files: list[bytes], context: int, document_masks: bool) -> dict[str, np.ndarray]:
    """Returns the examples: `tokens` uint8[examples, context + 1] and `num_targets` int32[examples].

    The first `num_targets` of the bytes `tokens[1:]` are to be predicted, the others are padding. Windows overlap by the one
    byte that is the last target of one and the first input of the next.
    """
    if not document_masks:
        text = np.frombuffer(b"".join(files), np.uint8)
        tokens = np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]  # a view: no byte is copied
        return {"tokens": tokens, "num_targets": np.full(len(tokens), context, np.int32)}
    pieces = [file[i : i + context + 1] for file in files for i in range(0, len(file) - 1, context)]
    tokens = np.frombuffer(b"".join(piece.ljust(context + 1, b"\0") for piece in pieces), np.uint8)
    num_targets = np.array([len(piece) - 1 for piece in pieces], np.int32)
    return {"tokens": tokens.reshape(-1, context + 1), "num_targets": num_targets}


class RandomTokens:
    """Examples like those of `windows`, drawn from their index alone: int32 tokens of the whole vocabulary, no padding."""

    def __init__(self, context: int, vocab: int):
        self.context, self.vocab = context, vocab

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(index).integers(self.vocab, size=self.context + 1, dtype=np.int32)
        return {"tokens": tokens, "num_targets": np.int32(self.context)}


def unigram_loss(train_files: list[bytes], eval_files: list[bytes]) -> float:
    """Returns the loss, in nats per byte, of predicting each evaluation byte by how often it occurs in training.

    This is what a model without context can reach; counts start at one, so that no byte is impossible.
    """
    counts = 1 + np.bincount(np.frombuffer(b"".join(train_files), np.uint8), minlength=VOCAB)
    log_probs = np.log(counts / counts.sum())
    return float(-log_probs[np.frombuffer(b"".join(eval_files), np.uint8)].mean())


# --- the model ------------------------------------------------------------------------------------------------------


def rules(stacked: bool) -> list[tuple[str, list[str | None]]]:
    """Returns the layout rules: for each parameter, the logical name of every dim. Norm scales are small and stay whole."""
    path, layers = ("blocks/", ["layers"]) if stacked else (r"blocks/\d+/", [])
    return [
        ("embed", ["vocab", "embed"]),
        (path + "query", [*layers, "embed", "heads", None]),
        (path + "(key|value)", [*layers, "embed", "kv_heads", None]),
        (path + "out", [*layers, "heads", None, "embed"]),
        (path + "up", [*layers, "embed", "mlp"]),
        (path + "down", [*layers, "mlp", "embed"]),
        ("head", ["embed", "vocab"]),
    ]


def init_params(
    key: jax.Array,
    width: int,
    layers: int,
    heads: int,
    stacked: bool,
    hidden: int | None = None,
    kv_heads: int | None = None,
    vocab: int = VOCAB,
) -> Params:
    """Returns the parameters; the same numbers whether the layers are stacked or not."""
    D, F, N, H, K, V = width, hidden or 4 * width, heads, width // heads, kv_heads or heads, vocab
    embed_key, head_key, blocks_key = jax.random.split(key, 3)

    def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape) / math.sqrt(fan_in)

    def init_block(key: jax.Array) -> Params:
        keys = jax.random.split(key, 6)
        return {
            "attention_norm": jnp.ones(D),
            "query": normal(keys[0], (D, N, H), D),
            "key": normal(keys[1], (D, K, H), D),
            "value": normal(keys[2], (D, K, H), D),
            "out": normal(keys[3], (N, H, D), D * 2 * layers),  # 2L branches add up in the residual stream
            "mlp_norm": jnp.ones(D),
            "up": normal(keys[4], (D, F), D),
            "down": normal(keys[5], (F, D), F * 2 * layers),
        }

    block_keys = jax.random.split(blocks_key, layers)
    return {
        "embed": normal(embed_key, (V, D), 1),
        "blocks": jax.vmap(init_block)(block_keys) if stacked else [init_block(k) for k in block_keys],
        "norm": jnp.ones(D),
        "head": normal(head_key, (D, V), D),
    }


def apply(params: Params, tokens_BT: jax.Array, dropout: float = 0.0, keys_B: jax.Array | None = None) -> jax.Array:
    """Returns the logits [B, T, V] of the byte after each position. Without `keys_B` nothing is dropped."""

    def block(x_BTD: jax.Array, layer: jax.Array, weights: Params) -> jax.Array:
        keys_2B = (None, None)
        if keys_B is not None:
            keys_2B = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, layer)), out_axes=1)(keys_B)
        h_BTD = attention(rms_norm(x_BTD, weights["attention_norm"]), weights)
        x_BTD = sk.shard(x_BTD + drop(h_BTD, dropout, keys_2B[0]), "batch", None, None)
        h_BTD = mlp(rms_norm(x_BTD, weights["mlp_norm"]), weights)
        return sk.shard(x_BTD + drop(h_BTD, dropout, keys_2B[1]), "batch", None, None)

    block = sk.remat(block)
    embed_VD = sk.shard(params["embed"], "vocab", None)  # D whole: looked up in a cut one, x would first be replicated
    x_BTD = sk.shard(embed_VD[tokens_BT], "batch", None, None)
    if isinstance(params["blocks"], list):
        for layer, weights in enumerate(params["blocks"]):
            x_BTD = block(x_BTD, jnp.int32(layer), weights)
    else:
        num_layers = params["blocks"]["mlp_norm"].shape[0]
        layers = (jnp.arange(num_layers), params["blocks"])
        x_BTD, _ = jax.lax.scan(lambda x_BTD, layer: (block(x_BTD, *layer), None), x_BTD, layers)
    logits_BTV = _product(rms_norm(x_BTD, params["norm"]), params["head"])
    return sk.shard(logits_BTV, "batch", None, "vocab")


def attention(x_BTD: jax.Array, weights: Params) -> jax.Array:
    """Returns causal self-attention with rotary positions, [B, T, D]. Softmax is in float32."""
    q_BTNH, k_BTKH, v_BTKH = (
        sk.shard(_product(x_BTD, weights[name]), "batch", None, heads, None)
        for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))
    )
    q_BTNH, k_BTKH = rotary(q_BTNH), rotary(k_BTKH)
    k_BTNH, v_BTNH = (_shared(x_BTKH, q_BTNH.shape[2]) for x_BTKH in (k_BTKH, v_BTKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH) / math.sqrt(q_BTNH.shape[-1])
    positions_T = jnp.arange(x_BTD.shape[1])
    is_past_TS = positions_T[:, None] >= positions_T
    scores_BNTS = jnp.where(is_past_TS, scores_BNTS.astype(jnp.float32), -jnp.inf)
    probs_BNTS = jax.nn.softmax(scores_BNTS).astype(x_BTD.dtype)
    mixed_BTNH = jnp.einsum("BNTS,BSNH->BTNH", probs_BNTS, v_BTNH)
    return _product(mixed_BTNH, weights["out"], num_contracted=2)


def _shared(x_BTKH: jax.Array, heads: int) -> jax.Array:
    """Returns [B, T, N, H]: each head of keys or values as often as queries share it."""
    groups = heads // x_BTKH.shape[2]
    return x_BTKH if groups == 1 else sk.shard(jnp.repeat(x_BTKH, groups, axis=2), "batch", None, "heads", None)


def rotary(x_BTNH: jax.Array) -> jax.Array:
    """Returns `x` with each pair of channels turned by an angle that grows with the position (Su et al., 2021)."""
    half = x_BTNH.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_TH = jnp.arange(x_BTNH.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos_TNH, sin_TNH = (f(angles_TH)[:, None, :].astype(x_BTNH.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x_BTNH[..., :half], x_BTNH[..., half:]
    return jnp.concatenate([a * cos_TNH - b * sin_TNH, a * sin_TNH + b * cos_TNH], axis=-1)


def mlp(x_BTD: jax.Array, weights: Params) -> jax.Array:
    """Returns the two-layer MLP with squared ReLU, [B, T, D]."""
    h_BTF = sk.shard(_product(x_BTD, weights["up"]), "batch", None, "mlp")
    return _product(jnp.square(jax.nn.relu(h_BTF)), weights["down"])


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Returns `x` scaled to a mean square of one along D, times `scale`. The mean is in float32."""
    mean_square = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean_square + 1e-6).astype(x_BTD.dtype) * scale_D


def drop(x_BTD: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Returns `x` with values set to zero at `rate`, drawn from each example's own key: the same on every mesh."""
    if keys_B is None:
        return x_BTD
    keep_BTD = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x_BTD.shape[1:]))(keys_B)
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
