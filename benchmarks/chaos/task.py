"""The task of `make chaos` and `make soak`: a small network whose step, evaluation and saves take long enough for a
fault in each."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

ROWS, PAUSE_S = 128, 0.05


@sk.task
def task():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8)).astype(np.float32)
    data = {"x": x, "y": np.sin(x.sum(1))}

    def init(key):
        return {"w": jax.random.normal(key, (8, 64)) / 3, "v": jnp.zeros(64)}

    def loss_fn(params, batch, key):
        return sk.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data=data, eval_data=data)


@sk.hook
def pause():
    return sk.Hook("pause", before_step=lambda run, step, state: time.sleep(PAUSE_S))


@sk.hook
def number_lines():
    lines = itertools.count(1)
    show = lambda run, step, state: print(f"line {next(lines)} of step {step} {'.' * 60}")
    return sk.Hook("number_lines", before_step=show)
