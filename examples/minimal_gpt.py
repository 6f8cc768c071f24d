"""A GPT in plain JAX: a pytree of arrays, a few functions of it, and a loss. Copy this file to begin a model.

    spmdkit train configs/minimal_gpt.yaml                          # one replica on each of four devices
    spmdkit train configs/minimal_gpt.yaml 'mesh={fsdp: 2, tensor: 2}' run_dir=runs/sharded

The same file runs on every replica, fsdp and tensor mesh, with the loss, the gradient and the parameters of one device
up to rounding. `RULES` names the dims of the weights that tensor parallelism shards: heads, and the hidden dim of the
MLP. `gpt.py` also runs on the context, expert and pipeline axes.

Expected: 1.77 nats per byte of text that was not trained on. 2.4 minutes on two CPU cores.

Shape suffixes: B examples, T positions, D width, N heads, H width of a head, F hidden width, V the 256 bytes.
"""

import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

VOCAB = 256
RULES = [
    (".*/query|.*/key|.*/value", ["embed", "heads", None]),
    (".*/out", ["heads", None, "embed"]),
    (".*/up", ["embed", "mlp"]),
    (".*/down", ["mlp", "embed"]),
]


def init_params(key, width, layers, heads, context):
    """Returns the parameters. Weights have a variance of one over the number of their inputs."""
    D, N, H, F = width, heads, width // heads, 4 * width
    keys = iter(jax.random.split(key, 3 + 6 * layers))
    weight = lambda *shape, inputs: jax.random.normal(next(keys), shape) / inputs**0.5
    blocks = [
        {
            "attention_norm": jnp.ones(D),
            **{name: weight(D, N, H, inputs=D) for name in ("query", "key", "value")},
            "out": weight(N, H, D, inputs=D * 2 * layers),
            "mlp_norm": jnp.ones(D),
            "up": weight(D, F, inputs=D),
            "down": weight(F, D, inputs=F * 2 * layers),
        }
        for _ in range(layers)
    ]
    embeddings = {"embed": weight(VOCAB, D, inputs=D), "position": weight(context, D, inputs=D)}
    return embeddings | {"blocks": blocks, "norm": jnp.ones(D), "head": weight(D, VOCAB, inputs=D)}


def norm(x_BTD, scale_D):
    return x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD**2, axis=-1, keepdims=True) + 1e-6) * scale_D


def block(x_BTD, w):
    """Returns the residual stream after causal attention and an MLP."""
    h_BTD = norm(x_BTD, w["attention_norm"])
    q_BTNH, k_BTNH, v_BTNH = (jnp.einsum("btd,dnh->btnh", h_BTD, w[name]) for name in ("query", "key", "value"))
    attended_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True)
    x_BTD += jnp.einsum("btnh,nhd->btd", attended_BTNH, w["out"])
    return x_BTD + jax.nn.gelu(norm(x_BTD, w["mlp_norm"]) @ w["up"]) @ w["down"]


def logits(params, tokens_BT):
    """Returns the logits of the next byte at each position, [B, T, V]."""
    x_BTD = params["embed"][tokens_BT] + params["position"][: tokens_BT.shape[1]]
    for w in params["blocks"]:
        x_BTD = block(x_BTD, w)
    return norm(x_BTD, params["norm"]) @ params["head"]


def loss_fn(params, batch, key):
    tokens_BT = batch["tokens"].astype(jnp.int32)
    scores_BTV = logits(params, tokens_BT[:, :-1])
    return sk.mean(optax.softmax_cross_entropy_with_integer_labels(scores_BTV, tokens_BT[:, 1:]))


def sample(params, prompt, num_bytes, temperature=0.7):
    """Returns `prompt` and `num_bytes` more, drawn one at a time. Their sum is at most the context."""
    step = jax.jit(
        lambda tokens_T, i, key: jax.random.categorical(key, logits(params, tokens_T[None])[0, i] / temperature)
    )
    tokens_T = np.zeros(len(params["position"]), np.int32)
    tokens_T[: len(prompt)] = list(prompt.encode())
    end = len(prompt) + num_bytes
    for i, key in zip(range(len(prompt), end), jax.random.split(jax.random.key(0), num_bytes), strict=True):
        tokens_T[i] = step(tokens_T, i - 1, key)
    return bytes(tokens_T[:end].tolist()).decode(errors="replace")


def read_text(context, pattern, max_bytes):
    """Returns (train, evaluation): `tokens` uint8[examples, context + 1], the last tenth of the text held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:max_bytes], np.uint8)
    tokens = text[: len(text) // (context + 1) * (context + 1)].reshape(-1, context + 1)
    split = len(tokens) * 9 // 10
    return {"tokens": tokens[:split]}, {"tokens": tokens[split:]}


@sk.task
def task(width=128, layers=2, heads=4, context=64, text="*.py", max_bytes=3_000_000):
    """Returns the task; the arguments are the config's `task_args`. `text` is a pattern of files in the library."""
    train_data, eval_data = read_text(context, text, max_bytes)
    init = lambda key: init_params(key, width, layers, heads, context)
    optimizer = lambda learning_rate: optax.adamw(learning_rate, b2=0.95, weight_decay=0.1)
    return sk.Task(init, loss_fn, optimizer, train_data=train_data, eval_data=eval_data, rules=RULES)
