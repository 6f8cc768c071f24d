"""The three models of the equality tests, as user-defined tasks: a GPT, a CNN with batch norm, linear regression.

The GPT and the CNN are the examples with small sizes. Each uses its example's optimizer (AdamW, SGD with momentum),
after a transformation that stores the gradient, so that one compiled program gives loss, gradient and parameters.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.program.task import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 32


def keep_gradient(optimizer):
    """Returns `optimizer` with an additional state, first in its chain: the gradient of the last step."""
    keep = optax.GradientTransformation(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda grads, state, params=None: (grads, grads),
    )
    return optax.chain(keep, optimizer)


def kept_gradient(state):
    """Returns the gradient of the last step, on the host."""
    return jax.device_get(state.opt_state[0])


def made_once(task, **changes):
    """Returns the task with the arrays of `init` as constants: compiling a random init takes longer than the step."""
    with jax.default_device(jax.devices()[0]):
        variables = jax.device_get(jax.jit(task.init)(jax.random.key(0)))
    return dataclasses.replace(task, init=lambda key: jax.tree.map(jnp.asarray, variables), **changes)


@functools.cache
def gpt():
    """Returns the GPT of examples/gpt.py: uneven token counts, dropout per example, `sk.remat`, `sk.shard`."""
    arguments = {"width": 32, "layers": 2, "heads": 4, "context": 8, "dropout": 0.1, "document_masks": True}
    task = load_task("gpt.py", "task", EXAMPLES, arguments | {"train_bytes": 4000, "eval_bytes": 400})
    return made_once(task, optimizer=keep_gradient(optax.adamw(3e-3, eps=1e-4)))


@functools.cache
def cnn(short_batches=False):
    """Returns the CNN of examples/digits_cnn.py: synchronized batch norm and dropout per example."""
    task = load_task("digits_cnn.py", "task", EXAMPLES, {"width": 8, "short_batches": short_batches})
    first = lambda num, tree: {name: x[:num] for name, x in tree.items()}
    return made_once(
        task,
        optimizer=keep_gradient(optax.sgd(0.05, momentum=0.9)),
        train_data=first(400, task.train_data),
        eval_data=first(50, task.eval_data),
        rules=[("Dense_0/kernel", ["mlp", None]), ("Conv_1/kernel", [None, None, "embed", "mlp"])],
    )


@functools.cache
def regression(num_examples=240, num_eval=50):
    """Returns linear regression from 16 features to 8 targets, with a weight per example and an L2 term; for `num_eval`
    0 without an evaluation, which is traced with each program."""
    return sk.Task(
        init=lambda key: {"w": jnp.full((16, 8), 0.1), "b": jnp.zeros(8)},
        loss_fn=regression_loss,
        optimizer=keep_gradient(optax.sgd(0.05)),
        train_data=regression_data(num_examples, 0),
        eval_data=regression_data(num_eval, 1) if num_eval else None,
        rules=[("w", ["embed", "mlp"])],
    )


def regression_loss(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    loss = sk.mean((error**2).sum(-1), weights=batch["weight"]) + 0.01 * (params["w"] ** 2).sum()
    return loss, {"worst": sk.mean(jnp.abs(error).max(-1))}


def regression_data(num_examples, seed):
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_examples, 16)).astype(np.float32)
    y = x @ random.normal(size=(16, 8)) + 0.1 * random.normal(size=(num_examples, 8))
    weight = random.uniform(0.1, 3, size=num_examples)
    return {"x": x, "y": y.astype(np.float32), "weight": weight.astype(np.float32)}


def regression_by_hand(params, batch):
    """Returns (loss, gradient) of `regression_loss` in float64, without JAX."""
    w, b = (np.asarray(params[name], np.float64) for name in ("w", "b"))
    x, y, weight = (np.asarray(batch[name], np.float64) for name in ("x", "y", "weight"))
    error = x @ w + b - y
    loss = (weight * (error**2).sum(-1)).sum() / weight.sum() + 0.01 * (w**2).sum()
    scaled = 2 * weight[:, None] * error / weight.sum()
    return loss, {"w": x.T @ scaled + 0.02 * w, "b": scaled.sum(0)}


MODELS = {"gpt": gpt, "cnn": cnn, "regression": regression}
