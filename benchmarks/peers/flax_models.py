"""The models in flax linen, and their parameters from those of `models.parameters`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import B2, CLASSES, DECAY, EPS, GROUPS, HEAD_WIDTH, LEARNING_RATE, STAGES, VOCAB, Model, rotary_angles

GATES = "ifgo"


def dense(num: int) -> nn.Dense:
    """Returns a layer without bias."""
    return nn.Dense(num, use_bias=False)


class Block(nn.Module):
    """Attention and MLP of the GPT."""

    model: Model

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        D, angles = self.model.width, jnp.asarray(rotary_angles(self.model))[:, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def rotary(x: jax.Array) -> jax.Array:
            a, b = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

        h = nn.RMSNorm(epsilon=1e-6)(x)
        q, k, v = (dense(D)(h).reshape(*x.shape[:2], -1, HEAD_WIDTH) for _ in range(3))
        h = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + dense(D)(h.reshape(x.shape))
        h = jnp.square(nn.relu(dense(4 * D)(nn.RMSNorm(epsilon=1e-6)(x))))
        return x + dense(D)(h)


class Net(nn.Module):
    """A model by its kind; returns the logits."""

    model: Model

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.model.kind == "resnet":
            return self.resnet(x)
        x = nn.Embed(VOCAB, self.model.width, embedding_init=nn.initializers.normal(1))(x)
        if self.model.kind == "lstm":
            return dense(VOCAB)(nn.RNN(nn.OptimizedLSTMCell(self.model.width))(x))
        for _ in range(self.model.layers):
            x = Block(self.model)(x)
        return dense(VOCAB)(nn.RMSNorm(epsilon=1e-6)(x))

    def resnet(self, x: jax.Array) -> jax.Array:
        conv = lambda num, size: nn.Conv(num, (size, size), use_bias=False)
        x = conv(STAGES[0], 3)(x)
        for i, num in enumerate(STAGES):
            x = h = conv(num, 1)(nn.avg_pool(x, (2, 2), (2, 2)) if i else x)
            for _ in range(2):
                h = conv(num, 3)(nn.relu(nn.GroupNorm(GROUPS, epsilon=1e-5)(h)))
            x = x + h
        return dense(CLASSES)(x.mean((1, 2)))


def losses(params: Any, x: jax.Array, y: jax.Array, model: Model) -> jax.Array:
    """Returns the mean cross-entropy of each example."""
    logits = Net(model).apply({"params": params}, x)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return found if found.ndim == 1 else found.mean(1)


def optimizer() -> optax.GradientTransformation:
    """Returns AdamW of all parameters."""
    return optax.adamw(LEARNING_RATE, b2=B2, eps=EPS, weight_decay=DECAY)


def variables(w: dict[str, np.ndarray], model: Model) -> Any:
    """Returns the parameters of `Net`."""
    kernel = lambda name: {"kernel": w[name]}
    if model.kind == "resnet":
        found = {"Conv_0": kernel("stem"), "Dense_0": kernel("head")}
        for i in range(len(STAGES)):
            found[f"Conv_{3 * i + 1}"] = kernel(f"{i}.project")
            for j in range(2):
                found[f"Conv_{3 * i + 2 + j}"] = kernel(f"{i}.{j}.conv")
                found[f"GroupNorm_{2 * i + j}"] = {name: w[f"{i}.{j}.{name}"] for name in ("scale", "bias")}
        return found
    found = {"Embed_0": {"embedding": w["embed"]}, "Dense_0": kernel("head")}
    if model.kind == "lstm":
        parts = {name: np.split(w[name], 4, axis=-1) for name in ("input", "recurrent", "bias")}
        cell = {f"i{gate}": {"kernel": parts["input"][i]} for i, gate in enumerate(GATES)}
        cell |= {
            f"h{gate}": {"kernel": parts["recurrent"][i], "bias": parts["bias"][i]} for i, gate in enumerate(GATES)
        }
        return found | {"OptimizedLSTMCell_0": cell}
    names = ("query", "key", "value", "out", "up", "down")
    for i in range(model.layers):
        found[f"Block_{i}"] = {f"Dense_{j}": kernel(f"{i}.{name}") for j, name in enumerate(names)} | {
            f"RMSNorm_{j}": {"scale": w[f"{i}.{name}_norm"]} for j, name in enumerate(("attention", "mlp"))
        }
    return found | {"RMSNorm_0": {"scale": w["norm"]}}
