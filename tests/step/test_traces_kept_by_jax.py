"""JAX keeps the traces of a user's jitted functions. A trace made for one mesh, or inside one loss, does not serve
another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
