"""Contrastive learning on real digits (scikit-learn's bundled set): the losses of CLIP and SimCLR, with negatives from
all replicas.

    spmdkit train configs/contrastive.yaml

A loss sees one replica's rows. The negatives of an example are all others of the whole batch, so `sk.all_gather` joins
the embeddings of all replicas, in the order of the batch, and gradients flow back to the replica that computed them.
Padding rows of a short batch are not negatives: the mask is gathered with the rows. The same code computes the same
loss on every mesh.

`loss: clip` has two encoders: the left half of a digit must find its own right half, and the reverse. `loss: simclr`
has one: two noisy, shifted views of a digit must find each other among all views (NT-Xent).

Expected: 0.24 of held-out digits find their own half among 128; by chance 0.008. 0.2 minutes on two CPU cores.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021); Chen et al., "A
Simple Framework for Contrastive Learning of Visual Representations" (2020).

Shape suffixes: B examples of one replica, A of all replicas, D width of an embedding, P pixels.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from digits_cnn import digits

import spmdkit as sk

Params = dict[str, Any]


def make_encoder(key: jax.Array, pixels: int, width: int, dim: int) -> Params:
    """Returns the parameters of an MLP [B, P] -> [B, D]."""
    first, last = jax.random.split(key)
    up_PW = jax.random.normal(first, (pixels, width)) * (2 / pixels) ** 0.5
    return {"up": up_PW, "bias": jnp.zeros(width), "down": jax.random.normal(last, (width, dim)) / width**0.5}


def encode(encoder: Params, x_BP: jax.Array) -> jax.Array:
    """Returns embeddings [B, D] of length one."""
    z_BD = jax.nn.relu(x_BP @ encoder["up"] + encoder["bias"]) @ encoder["down"]
    return z_BD / jnp.linalg.norm(z_BD + 1e-6, axis=-1, keepdims=True)


def own_places(num: int) -> jax.Array:
    """Returns int32[B]: the positions of this replica's rows among those of all replicas."""
    return sk.replica_index() * num + jnp.arange(num, dtype=jnp.int32)


def clip_loss(params: Params, batch: dict, key: jax.Array | None) -> tuple[sk.Mean, dict[str, sk.Mean]]:
    """Returns CLIP's symmetric loss: each half is matched with its other half among those of all replicas."""
    left, right = jnp.split(batch["images"], 2, axis=2)
    a_BD = encode(params["left"], left.reshape(len(left), -1))
    b_BD = encode(params["right"], right.reshape(len(right), -1))
    (a_AD, b_AD), real_A = sk.all_gather((a_BD, b_BD), with_mask=True)
    own_B, scale = own_places(len(a_BD)), jnp.exp(params["scale"])

    def find(x_BD: jax.Array, y_AD: jax.Array) -> jax.Array:
        return jnp.where(real_A, scale * x_BD @ y_AD.T, -jnp.inf)

    rows, columns = find(a_BD, b_AD), find(b_BD, a_AD)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = sk.mean((cross_entropy(rows, own_B) + cross_entropy(columns, own_B)) / 2)
    return loss, {"found": sk.mean(rows.argmax(-1) == own_B)}


def simclr_loss(params: Params, batch: dict, key: jax.Array | None) -> tuple[sk.Mean, dict[str, sk.Mean]]:
    """Returns NT-Xent: each view is matched with the other view of its image among all views of all images except
    itself."""
    images, num = batch["images"], len(batch["images"])
    if key is None:
        views = (images, jnp.roll(images, 1, axis=2))
    else:
        views = tuple(jax.vmap(view)(images, sk.example_keys(salt)) for salt in (0, 1))
    a_BD, b_BD = (encode(params["both"], x.reshape(num, -1)) for x in views)
    (a_AD, b_AD), real_A = sk.all_gather((a_BD, b_BD), with_mask=True)
    own_B, scale = own_places(num), jnp.exp(params["scale"])
    itself_BA = own_B[:, None] == jnp.arange(len(a_AD))

    def find(x_BD: jax.Array, others_AD: jax.Array, same_AD: jax.Array) -> jax.Array:
        others = jnp.where(real_A, scale * x_BD @ others_AD.T, -jnp.inf)
        same = jnp.where(real_A & ~itself_BA, scale * x_BD @ same_AD.T, -jnp.inf)
        return jnp.concatenate([others, same], axis=1)

    first, second = find(a_BD, b_AD, a_AD), find(b_BD, a_AD, b_AD)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = sk.mean((cross_entropy(first, own_B) + cross_entropy(second, own_B)) / 2)
    return loss, {"found": sk.mean(first.argmax(-1) == own_B)}


def view(image: jax.Array, key: jax.Array) -> jax.Array:
    """Returns one image shifted by up to a pixel in each direction, with noise."""
    shift_key, noise_key = jax.random.split(key)
    dy, dx = jax.random.randint(shift_key, (2,), -1, 2)
    moved = jnp.roll(jnp.roll(image, dy, axis=0), dx, axis=1)
    return moved + 0.1 * jax.random.normal(noise_key, image.shape)


@sk.task
def task(loss: Literal["clip", "simclr"] = "clip", width: int = 256, dim: int = 64) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`.

    Args:
        loss: `clip` or `simclr`.
        width: of the hidden layer of an encoder.
        dim: of an embedding.
    """

    def init(key: jax.Array) -> Params:
        left, right = jax.random.split(key)
        scale = {"scale": jnp.log(jnp.float32(10.0))}
        if loss == "simclr":
            return scale | {"both": make_encoder(left, 64, width, dim)}
        return scale | {"left": make_encoder(left, 32, width, dim), "right": make_encoder(right, 32, width, dim)}

    loss_fn = {"clip": clip_loss, "simclr": simclr_loss}[loss]
    train_data, eval_data = digits()
    return sk.Task(init, loss_fn, optax.adamw, train_data=train_data, eval_data=eval_data, unit="images")
