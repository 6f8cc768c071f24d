"""Keras on TensorFlow or JAX: `Model.fit`; two devices by MirroredStrategy and by DataParallel.

python keras_worker.py MODEL NUM_DEVICES tensorflow|jax
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

NAME, NUM, BACKEND = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ.update(KERAS_BACKEND=BACKEND, TF_CPP_MIN_LOG_LEVEL="2", JAX_PLATFORMS="cpu")

if BACKEND == "jax":
    import jax

    jax.config.update("jax_num_cpu_devices", NUM)

import keras
import numpy as np
from keras import layers, ops
from models import (
    B2,
    CLASSES,
    DECAY,
    EPS,
    GROUPS,
    HEAD_WIDTH,
    IMAGE,
    LEARNING_RATE,
    MODELS,
    STAGES,
    VOCAB,
    Model,
    parameters,
    rotary_angles,
    rows,
)
from worker import CHECKED_STEPS, serve


class Block(layers.Layer):
    """Attention and MLP of the GPT."""

    def __init__(self, model: Model):
        super().__init__()
        D = model.width
        dense = lambda num: layers.Dense(num, use_bias=False)
        self.attention_norm = layers.RMSNormalization(epsilon=1e-6)
        self.query, self.key, self.value, self.out = (dense(D) for _ in range(4))
        self.mlp_norm, self.up, self.down = layers.RMSNormalization(epsilon=1e-6), dense(4 * D), dense(D)
        angles = rotary_angles(model)[:, None]
        self.cos, self.sin, self.heads = np.cos(angles), np.sin(angles), (model.context, D // HEAD_WIDTH, HEAD_WIDTH)

    def build(self, shape: Any) -> None:
        wide = (*shape[:-1], 4 * shape[-1])
        for layer in (self.attention_norm, self.query, self.key, self.value, self.out, self.mlp_norm, self.up):
            layer.build(shape)
        self.down.build(wide)

    def rotary(self, x: Any) -> Any:
        a, b = ops.split(x, 2, axis=-1)
        return ops.concatenate([a * self.cos - b * self.sin, a * self.sin + b * self.cos], axis=-1)

    def call(self, x: Any) -> Any:
        h = self.attention_norm(x)
        q, k, v = (ops.reshape(layer(h), (-1, *self.heads)) for layer in (self.query, self.key, self.value))
        h = ops.dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.out(ops.reshape(h, (-1, self.heads[0], self.heads[1] * self.heads[2])))
        return x + self.down(ops.square(ops.relu(self.up(self.mlp_norm(x)))))


def build(model: Model) -> keras.Model:
    """Returns the model, with variables in the order of `parameters`."""
    if model.kind == "resnet":
        x = inputs = keras.Input((IMAGE, IMAGE, 3))
        conv = lambda num, size: layers.Conv2D(num, size, padding="same", use_bias=False)
        x = conv(STAGES[0], 3)(x)
        for i, num in enumerate(STAGES):
            x = h = conv(num, 1)(layers.AveragePooling2D(2)(x) if i else x)
            for _ in range(2):
                h = conv(num, 3)(layers.ReLU()(layers.GroupNormalization(GROUPS, epsilon=1e-5)(h)))
            x = x + h
        return keras.Model(inputs, layers.Dense(CLASSES, use_bias=False)(layers.GlobalAveragePooling2D()(x)))
    inputs = keras.Input((model.context,), dtype="int32")
    x = layers.Embedding(VOCAB, model.width)(inputs)
    if model.kind == "lstm":
        x = layers.LSTM(model.width, return_sequences=True)(x)
    else:
        for _ in range(model.layers):
            x = Block(model)(x)
        x = layers.RMSNormalization(epsilon=1e-6)(x)
    return keras.Model(inputs, layers.Dense(VOCAB, use_bias=False)(x))


def scope() -> Any:
    """Returns the scope in which the model is built."""
    if NUM == 1:
        return contextlib.nullcontext()
    if BACKEND == "jax":
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
        return contextlib.nullcontext()
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(NUM)])
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(NUM)]).scope()


def main() -> None:
    """Serves `fit`."""
    model = MODELS[NAME]
    with scope():
        net = build(model)
        initial = parameters(model).values()
        shapes = [tuple(v.shape) for v in net.trainable_variables]
        assert shapes == [w.shape for w in initial], shapes
        for variable, w in zip(net.trainable_variables, initial, strict=True):
            variable.assign(w)
        net.compile(
            optimizer=keras.optimizers.AdamW(LEARNING_RATE, weight_decay=DECAY, beta_2=B2, epsilon=EPS),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    # Several copies of the batch, so that one `fit` trains a block of steps.
    x, y = (np.concatenate([a] * model.steps) for a in rows(model))

    def run(steps: int) -> list[float]:
        num = steps * model.batch
        return net.fit(x[:num], y[:num], batch_size=model.batch, shuffle=False, verbose=0).history["loss"]

    losses = [run(1)[0] for _ in range(CHECKED_STEPS)]
    serve(losses, run, ["keras", "tensorflow-cpu" if BACKEND == "tensorflow" else "jax"])


if __name__ == "__main__":
    main()
