"""`sk.value_and_grad` of a part of the parameters: a generator against a critic, an encoder that is frozen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.step.trace_context import Placements
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, MESHES, STEPS, TOLERANCE, leaf_errors, program_of

DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 8)).astype(np.float32)
RATE = 0.1


def init(key):
    layer = lambda seed: {"w": normal(seed, 8, 8) / 3, "b": jnp.full(8, 0.1)}
    return {"generator": layer(0), "critic": layer(1)}


def apply(layer, x):
    return jnp.tanh(x @ layer["w"] + layer["b"])


def fool(generator, critic, rows):
    return -apply(critic, apply(generator, rows)).sum(-1)


def judge(critic, generator, rows):
    """The critic's loss, with a penalty on its gradient at the real rows."""
    slope = jax.vmap(jax.grad(lambda x: apply(critic, x).sum()))(rows)
    return (apply(critic, apply(generator, rows)) - apply(critic, rows)).sum(-1) + ((slope**2).sum(-1) - 1) ** 2


def train_step(state, batch):
    g, d = state.params["generator"], state.params["critic"]
    (d_loss, _), d_grads = sk.value_and_grad(lambda d, rows, key: sk.mean(judge(d, g, rows)))(d, batch, state.key)
    (g_loss, _), g_grads = sk.value_and_grad(lambda g, rows, key: sk.mean(fool(g, d, rows)))(g, batch, state.key)
    state = state.apply_gradients({"generator": g_grads, "critic": d_grads})
    return state, {"generator": g_loss, "critic": d_loss}


@functools.cache
def reference():
    @jax.jit
    def stepped(params, rows):
        g, d = params["generator"], params["critic"]
        g_loss, g_grads = jax.value_and_grad(lambda g: fool(g, d, rows).mean())(g)
        d_loss, d_grads = jax.value_and_grad(lambda d: judge(d, g, rows).mean())(d)
        moved = jax.tree.map(lambda p, g: p - RATE * g, params, {"generator": g_grads, "critic": d_grads})
        return moved, (g_loss, d_loss)

    params, losses = init(None), []
    for step in range(STEPS):
        params, found = stepped(params, DATA[step * BATCH : (step + 1) * BATCH])
        losses.append(tuple(map(float, found)))
    return losses, params


def task(mesh):
    rules = [(".*/w", ["embed", "mlp"]), (".*/b", ["mlp"])] if "tensor" in mesh else []
    return sk.Task(init, train_step=train_step, optimizer=optax.sgd(RATE), train_data=DATA, rules=rules)


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    slow_except([("data 2 x fsdp 4", 1)], [*((mesh, 1) for mesh in MESHES), ("data 2 x fsdp 4", 2)]),
)
def test_adversarial_networks_equal_one_device(mesh, microbatches):
    program = program_of(task(mesh), mesh, microbatches=microbatches)
    state, losses = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        losses.append((float(metrics["generator"]), float(metrics["critic"])))
    expected, params = reference()
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    errors = leaf_errors(jax.device_get(state.params), jax.device_get(params))
    assert max(errors.values()) < TOLERANCE, errors


def test_a_parts_gradient_lives_where_the_parameters_do():
    specs = {"generator": {"w": P("fsdp"), "b": P()}, "critic": {"w": P("fsdp"), "b": P(None)}, "head": P("tensor")}
    shapes = {"critic/b": (4,), "critic/w": (8, 4), "generator/b": (4,), "generator/w": (8, 4), "head": (2,)}
    table = Placements(specs, specs, specs, shapes)
    zeros = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    assert table.of(zeros).compute["w"] == P("fsdp")
    assert table.of((zeros, zeros)).update[1]["w"] == P("fsdp")
    assert table.of({"head": jnp.zeros(2)}).gradient == {"head": P("tensor")}
    assert table.of({"head": jnp.zeros(3), "other": jnp.zeros(2)}).compute == {"head": P(), "other": P()}
    moved = dataclasses.replace(table, compute={**specs, "critic": {"w": P(None, "fsdp"), "b": P()}})
    assert moved.of(zeros).compute["w"] == P(), "two parts that are placed differently: none is taken for the other"
