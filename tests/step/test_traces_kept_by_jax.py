"""JAX keeps the traces of a user's jitted functions. A trace made for one mesh, or inside one loss, does not serve
another. A loss is traced as often as its result is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.core_models import keep_gradient
from tests.support.core_runs import assert_same_run, program_of, train

D = 16


@jax.jit
def wide(x_BD, w_DF):
    return sk.shard(jnp.tanh(x_BD @ w_DF), "batch", "mlp")


@jax.jit
def noise(x_BD):
    return jax.vmap(lambda key: jax.random.normal(key, (D,)))(sk.example_keys())


@jax.checkpoint
def block(x_BD, w_DF):
    return sk.shard(wide(x_BD, w_DF) @ w_DF.T, "batch", None)


def init(key):
    return {"w": jax.random.normal(key, (D, 4 * D)) / 8}


def loss_fn(params, batch, key):
    x_BD = batch["x"] + 0.1 * noise(batch["x"])
    return sk.mean((block(x_BD, params["w"]) ** 2).mean(1))


def test_jitted_user_functions_serve_every_mesh():
    data = {"x": np.random.default_rng(0).normal(size=(64, D)).astype(np.float32)}
    task = sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data, rules=[("w", ["embed", "mlp"])])
    one = train(program_of(task), evaluate=False)
    for mesh, microbatches in (({"data": 2, "tensor": 2}, 1), ({"data": 8}, 2)):
        found = train(program_of(task, mesh=mesh, microbatches=microbatches), evaluate=False)
        assert_same_run(found, one)


TWO = {"mesh": {"data": 2}}


@pytest.mark.parametrize(
    ("kind", "settings", "times"),
    [
        ("loss", {}, 3),  # the analysis, its comparison of constants, and the gradient
        ("loss", TWO | {"microbatches": 2}, 3),
        ("loss", TWO | {"reducer": {"powersgd": {"rank": 1}}}, 4),  # the gradient without and with the reducer's state
        ("loss", {"remat": "full"}, 4),  # the gradient without and with recomputation
        ("evaluated", TWO, 4),  # and the evaluation
        ("global", TWO | {"microbatches": 2}, 4),  # and the comparison of the constants of the step
        ("replica", TWO | {"microbatches": 2}, 4),
    ],
)
def test_a_loss_is_traced_only_as_needed(kind, settings, times):
    traced = []

    def counted(params, batch, key):
        traced.append(jnp.shape(batch["x"]))
        return sk.mean(((batch["x"] @ params["w"]) ** 2).sum(1))

    def train_step(state, batch):
        (loss, _), grads = sk.value_and_grad(counted)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss}

    data, rates = {"x": np.ones((64, D), np.float32)}, optax.sgd(0.1)
    if kind in ("loss", "evaluated"):
        task = sk.Task(init, counted, rates, train_data=data, eval_data=data if kind == "evaluated" else None)
    else:
        task = sk.Task(init, train_step=train_step, optimizer=rates, train_data=data, view=kind)
    program = program_of(task, **settings)
    assert program.lowered and (not program.has_eval or program.evaluator.lowered)
    assert len(traced) == times, traced
