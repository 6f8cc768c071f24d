"""A small stack of matrix products with a known number of operations, as a user's file."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk


@sk.task
def task(width: int = 64, layers: int = 4) -> sk.Task:
    def init(key):
        return {"layers": jax.random.normal(key, (layers, width, width)) / width**0.5}

    def loss_fn(params, batch, key):
        @sk.remat
        def layer(x, w):
            return jnp.tanh(x @ w)

        y = jax.lax.scan(lambda x, w: (layer(x, w), None), batch["x"], params["layers"])[0]
        return sk.mean(((y - batch["y"]) ** 2).mean(-1))

    x = np.zeros((4096, width), np.float32)
    return sk.Task(
        init, loss_fn, optax.adam(1e-3), train_data={"x": x, "y": x}, rules=[("layers", [None, "embed", "mlp"])]
    )
