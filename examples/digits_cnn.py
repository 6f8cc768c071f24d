"""Handwritten digits (scikit-learn's bundled set) with a flax linen CNN: batch norm and dropout on any mesh.

    spmdkit train configs/digits_cnn.yaml

Batch statistics are over the whole global batch: linen's `BatchNorm(axis_name=("replica", "data"))`, unchanged. Dropout
draws from one key per example, so that every mesh drops the same values.

Shape suffixes: B examples that one call of the loss sees, H height, W width, C channels, K the 10 classes.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

REPLICA_AXES = ("replica", "data")
Arrays = dict[str, Any]


@sk.task
def task(width: int = 32, dropout: float = 0.3, short_batches: bool = False) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`.

    Args:
        width: channels after the first convolution; the second has twice as many.
        dropout: probability of dropping a feature before the last layer.
        short_batches: True excludes padding rows from the batch statistics; use it with `data.drop_remainder: false`.
    """
    model = CNN(width, dropout, short_batches)

    def init(key: jax.Array) -> sk.Variables:
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)))
        return sk.Variables(variables["params"], {"batch_stats": variables["batch_stats"]})

    def loss_fn(params: Arrays, state: Arrays, batch: Arrays, key: jax.Array) -> tuple[sk.Mean, dict, Arrays]:
        logits_BK, new_state = model.apply(
            {"params": params, **state},
            batch["images"],
            train=True,
            keys_B=sk.example_keys(),
            is_real_B=sk.example_mask(),
            mutable=["batch_stats"],
        )
        metrics = measure(logits_BK, batch["labels"])
        return metrics.pop("loss"), metrics, new_state

    def eval_fn(params: Arrays, state: Arrays, batch: Arrays) -> dict[str, sk.Mean]:
        return measure(model.apply({"params": params, **state}, batch["images"]), batch["labels"])

    train_data, eval_data = digits()
    return sk.Task(
        init=init,
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        optimizer=lambda learning_rate: optax.sgd(learning_rate, momentum=0.9, nesterov=True),
        train_data=train_data,
        eval_data=eval_data,
        unit="images",
    )


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns (train, evaluation): `images` float32[examples, 8, 8, 1] in 0..1 and `labels` int32[examples].

    The last fifth is held out. The set is ordered by writer, so most of it is by writers that are not in the training
    set.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images[..., None] / 16).astype(np.float32)
    labels = bunch.target.astype(np.int32)
    cut = len(images) * 4 // 5
    return {"images": images[:cut], "labels": labels[:cut]}, {"images": images[cut:], "labels": labels[cut:]}


def measure(logits_BK: jax.Array, labels_B: jax.Array) -> dict[str, sk.Mean]:
    """Returns the cross-entropy in nats and the accuracy; padding rows do not count in an `sk.mean`."""
    logits_BK = logits_BK.astype(jnp.float32)
    loss_B = optax.softmax_cross_entropy_with_integer_labels(logits_BK, labels_B)
    return {"loss": sk.mean(loss_B), "accuracy": sk.mean(logits_BK.argmax(-1) == labels_B)}


class CNN(nn.Module):
    """Two convolutions with batch norm, dropout, one dense layer."""

    width: int
    dropout: float
    short_batches: bool

    @nn.compact
    def __call__(
        self,
        x_BHWC: jax.Array,
        train: bool = False,
        keys_B: jax.Array | None = None,
        is_real_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits [B, K]. `keys_B` and `is_real_B` are needed in training only."""
        for layer, (width, stride) in enumerate([(self.width, 1), (2 * self.width, 2)]):
            x_BHWC = nn.Conv(width, (3, 3), stride, use_bias=False)(x_BHWC)
            if self.short_batches:
                x_BHWC = MaskedBatchNorm(name=f"BatchNorm_{layer}")(x_BHWC, not train, is_real_B)
            else:
                x_BHWC = nn.BatchNorm(not train, momentum=0.9, axis_name=REPLICA_AXES)(x_BHWC)
            x_BHWC = nn.relu(x_BHWC)
        x_BC = x_BHWC.reshape(x_BHWC.shape[0], -1)
        if train:
            x_BC = drop(x_BC, self.dropout, keys_B)
        return nn.Dense(10)(x_BC)


def drop(x_BC: jax.Array, rate: float, keys_B: jax.Array) -> jax.Array:
    """Returns `x` with values set to zero at `rate`, drawn from each example's own key: the same on every mesh."""
    keep_BC = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x_BC.shape[1:]))(keys_B)
    return jnp.where(keep_BC, x_BC / (1 - rate), 0)


class MaskedBatchNorm(nn.Module):
    """`nn.BatchNorm` with statistics that exclude padding rows, the same on any number of replicas.

    linen's own `mask` averages the means of the replicas (flax 0.12.8). That is wrong if they hold unequal numbers of
    real rows, and NaN if one holds none. Here sums and counts are added over the replicas, and divided once.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, use_running_average: bool, is_real_B: jax.Array | None) -> jax.Array:
        """Returns `x` normalized per channel, scaled and shifted."""
        num_channels = x_BHWC.shape[-1]
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, num_channels)
        running_var = self.variable("batch_stats", "var", jnp.ones, num_channels)
        scale = self.param("scale", nn.initializers.ones, num_channels)
        bias = self.param("bias", nn.initializers.zeros, num_channels)
        mean, var = running_mean.value, running_var.value
        if not use_running_average:
            values_BHWC = x_BHWC.astype(jnp.float32)
            is_real_BHWC = jnp.broadcast_to(is_real_B[:, None, None, None], x_BHWC.shape)
            sums = [jnp.sum(v, (0, 1, 2), where=is_real_BHWC) for v in (values_BHWC, values_BHWC**2)]
            count = jnp.sum(is_real_BHWC, (0, 1, 2), dtype=jnp.float32)
            total, total_of_squares, count = jax.lax.psum((*sums, count), REPLICA_AXES)
            # A microbatch may hold padding only: it has no statistics, and does not change the running ones.
            mean = total / jnp.maximum(count, 1)
            var = jnp.maximum(total_of_squares / jnp.maximum(count, 1) - mean**2, 0)
            momentum = jnp.where(count > 0, self.momentum, 1.0)
            running_mean.value = momentum * running_mean.value + (1 - momentum) * mean
            running_var.value = momentum * running_var.value + (1 - momentum) * var
        factor = scale * jax.lax.rsqrt(var + self.epsilon).astype(scale.dtype)
        return (x_BHWC - mean.astype(x_BHWC.dtype)) * factor + bias
