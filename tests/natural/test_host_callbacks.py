"""Callbacks that JAX does not map (`pure_callback` without `vmap_method`, ordered ones) run on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import spmdkit as sk
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, STEPS, assert_same_run, keep_gradient, train

X = np.random.default_rng(0).normal(size=(BATCH * STEPS, 4)).astype(np.float32)
DATA = {"x": X, "id": np.arange(BATCH * STEPS, dtype=np.int32)}
MESHES = {
    "data 4": {"data": 4},
    "fsdp 4": {"fsdp": 4},
    "data 2 x fsdp 2": {"data": 2, "fsdp": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
}


@jax.custom_vjp
def tanh_on_host(x):
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


tanh_on_host.defvjp(lambda x: (y := tanh_on_host(x), y), lambda y, g: (g * (1 - y**2),))


def number_of_dims(x):
    return np.float32(x.ndim)


def task(ordered, printed):
    def loss_fn(params, batch, key):
        io_callback(lambda x: ordered.append(int(x)), None, batch["id"][0], ordered=True)
        jax.debug.callback(lambda x: printed.append(int(x)), batch["id"][0], ordered=True)
        jax.debug.print("first row {}", batch["id"][0], ordered=True)
        hidden = tanh_on_host(batch["x"] @ params["w"])
        dims = jax.pure_callback(number_of_dims, jax.ShapeDtypeStruct((), jnp.float32), batch["x"])
        return sk.mean((hidden**2).sum(-1)), {"dims": sk.scalar(dims)}

    init = lambda key: {"w": normal(0, 4, 8) / 2}
    return sk.Task(init, loss_fn, keep_gradient(optax.adam(0.1)), train_data=DATA, rules=[("w", [None, "mlp"])])


@pytest.mark.parametrize("mesh", slow_except(["data 2 x fsdp 2"], MESHES))
def test_callbacks_run_in_order_on_every_mesh(mesh, capfd):
    runs, calls = [], []
    for sizes in ({}, MESHES[mesh]):
        ordered, printed = [], []
        program, run = train(task(ordered, printed), sizes, microbatches=2)
        jax.effects_barrier()
        runs.append(run)
        calls.append([ordered, printed])
    assert_same_run(runs[1], runs[0])
    replicas = program.num_replicas
    for found in calls[1]:
        assert len(found) == STEPS * 2 * replicas
        assert len(set(found)) == len(found)  # each microbatch of each replica, once
        first = [x % BATCH // (BATCH // replicas) for x in found]
        for replica in range(replicas):
            of_replica = [x for x, r in zip(found, first, strict=True) if r == replica]
            assert of_replica == sorted(of_replica)
    assert calls[1][0] == calls[1][1]
    assert capfd.readouterr().out.count("first row") == STEPS * 2 * (1 + replicas)
