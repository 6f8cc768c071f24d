"""A vision transformer on real digits (scikit-learn's bundled set), in plain JAX.

    spmdkit train configs/vit_digits.yaml

An image of 8 x 8 pixels is 16 patches of 2 x 2. Each is a token with a learned position. The mean of the last layer's
tokens predicts the digit. In training each image is shifted by up to a pixel, with a key per example, so every mesh
trains on the same images.

Expected: accuracy 0.87 on the held-out fifth, mostly by writers that were not trained on.
0.4 minutes on two CPU cores.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021).

Shape suffixes: B examples, T patches, P pixels of a patch, D width, N heads, H width of a head, F hidden width.
"""

import jax
import jax.numpy as jnp
import optax
from digits_cnn import digits, measure

import spmdkit as sk

SIDE, PATCH = 8, 2
RULES = [
    (".*/qkv", [None, "embed", "heads", None]),
    (".*/out", ["heads", None, "embed"]),
    (".*/up", ["embed", "mlp"]),
    (".*/down", ["mlp", "embed"]),
]


def init_params(key, width, layers, heads):
    D, H, F, T = width, width // heads, 2 * width, (SIDE // PATCH) ** 2
    keys = iter(jax.random.split(key, 2 + 4 * layers))
    weight = lambda *shape, inputs: jax.random.normal(next(keys), shape) / inputs**0.5
    blocks = [
        {
            "qkv": weight(3, D, heads, H, inputs=D),
            "out": weight(heads, H, D, inputs=2 * layers * D),
            "up": weight(D, F, inputs=D),
            "down": weight(F, D, inputs=2 * layers * F),
        }
        for _ in range(layers)
    ]
    patch = weight(PATCH**2, D, inputs=PATCH**2)
    return {"patch": patch, "position": weight(T, D, inputs=D), "blocks": blocks, "head": jnp.zeros((D, 10))}


def patches(images_BHWC):
    """Returns the pixels of each patch, [B, T, P]."""
    num, n = len(images_BHWC), SIDE // PATCH
    x = images_BHWC.reshape(num, n, PATCH, n, PATCH).transpose(0, 1, 3, 2, 4)
    return x.reshape(num, n * n, PATCH**2)


def norm(x_BTD):
    return jax.nn.standardize(x_BTD, axis=-1)


def logits(params, images_BHWC):
    """Returns the logits of the ten classes, [B, 10]."""
    x_BTD = patches(images_BHWC) @ params["patch"] + params["position"]
    for w in params["blocks"]:
        q_BTNH, k_BTNH, v_BTNH = jnp.einsum("btd,cdnh->cbtnh", norm(x_BTD), w["qkv"])
        x_BTD += jnp.einsum("btnh,nhd->btd", jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH), w["out"])
        x_BTD += jax.nn.gelu(norm(x_BTD) @ w["up"]) @ w["down"]
    return norm(x_BTD).mean(1) @ params["head"]


def shifted(image_HWC, key):
    """Returns the image, shifted by -1, 0 or 1 pixel in each direction."""
    dy, dx = jax.random.randint(key, (2,), 0, 3)
    padded = jnp.pad(image_HWC, ((1, 1), (1, 1), (0, 0)))
    return jax.lax.dynamic_slice(padded, (dy, dx, jnp.int32(0)), image_HWC.shape)


def loss_fn(params, batch, key):
    images_BHWC = jax.vmap(shifted)(batch["images"], sk.example_keys("shift"))
    metrics = measure(logits(params, images_BHWC), batch["labels"])
    return metrics.pop("loss"), metrics


def eval_fn(params, batch):
    return measure(logits(params, batch["images"]), batch["labels"])


@sk.task
def task(width=48, layers=2, heads=4):
    """Returns the task; the arguments are the config's `task_args`."""
    train_data, eval_data = digits()
    return sk.Task(
        init=lambda key: init_params(key, width, layers, heads),
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        optimizer=lambda learning_rate: optax.adamw(learning_rate, weight_decay=0.05),
        train_data=train_data,
        eval_data=eval_data,
        rules=RULES,
        unit="images",
    )
