"""A step or a loss that is already jitted is used as it is; its donation and shardings have no effect."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.config import Config
from tests.support.core_runs import assert_close
from tests.support.fixed_numbers import normal

MESHES = {"one": {}, "data": {"data": 4}, "fsdp": {"data": 2, "fsdp": 2}}
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)
DATA = {"x": X, "y": X.sum(1)}
GRAPH = nnx.graphdef(nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0))))
OTHER = Mesh(np.array(jax.devices()[4:8]), ("dp",))
PLACED = {
    "in_shardings": (NamedSharding(OTHER, PartitionSpec()), NamedSharding(OTHER, PartitionSpec("dp"))),
    "donate_argnums": 0,
}


def init(key):
    return {"kernel": normal(0, 4, 8), "bias": jnp.zeros(8)}


def nnx_init(key):
    return nnx.split(nnx.Linear(4, 8, rngs=nnx.Rngs(key)))[1]


def errors(params, batch, power=2, act=jnp.tanh):
    return (act(batch["x"] @ params["kernel"] + params["bias"]).sum(-1) - batch["y"]) ** power


def step(state, batch, power=2):
    loss, grads = jax.value_and_grad(lambda params: errors(params, batch, power).mean())(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def nnx_errors(state, batch):
    model = nnx.merge(GRAPH, state)
    return (model(batch["x"]).sum(-1) - batch["y"]) ** 2


def loss_of(fn):
    return lambda params, batch, key: sk.mean(fn(params, batch))


def with_leaves(jit):
    """A function of a pytree with leaves that are no arrays."""
    fn = jit(lambda parts, batch: errors(parts["params"], batch, parts["power"], parts["act"]))
    return loss_of(lambda params, batch: fn({"params": params, "power": 2, "act": jax.nn.relu}, batch))


CASES = {
    "placed step": lambda jit: {"train_step": jax.jit(step, **PLACED) if jit else step},
    "placed loss": lambda jit: {"loss_fn": loss_of(jax.jit(errors, **PLACED) if jit else errors)},
    "static": lambda jit: {
        "train_step": functools.partial(jax.jit(step, static_argnames="power") if jit else step, power=4)
    },
    "nnx": lambda jit: {"init": nnx_init, "loss_fn": loss_of(nnx.jit(nnx_errors) if jit else nnx_errors)},
    "equinox step": lambda jit: {"train_step": eqx.filter_jit(step) if jit else step},
    "equinox": lambda jit: {"loss_fn": with_leaves(eqx.filter_jit if jit else lambda fn: fn)},
}


def train(case, jit, mesh):
    task = sk.Task(**{"init": init, "optimizer": optax.adam(1e-2), "train_data": DATA} | CASES[case](jit))
    layout = {"min_shard_bytes": 1} if "fsdp" in mesh else {}
    config = Config(task="mine.py:task", steps=3, batch_size=8, mesh=mesh, layout=layout)
    program = sk.build(config, task=task, devices=jax.devices()[:4])
    state = program.init()
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
    return program, jax.tree.map(np.asarray, state.params)


@functools.cache
def expected(case):
    return train(case, False, {})[1]


@pytest.mark.forms(6)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_a_jitted_function_equals_the_plain_one_on_one_device(case, mesh):
    program, params = train(case, True, MESHES[mesh])
    assert_close(params, expected(case))
    notes = [line for line in program.explain().splitlines() if "jax.jit" in line]
    assert len(notes) == case.startswith("placed")
    assert all("donate_argnums, in_shardings of jax.jit(" in note and "no effect" in note for note in notes)
