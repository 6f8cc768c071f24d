"""Reducers beside stages and experts: what crosses replicas is each device's part of a leaf, and at lossless options
the sum of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.communication.reducers.test_reducer_contract import ANOTHER_SUM, ROWS, lossless
from tests.support.core_runs import assert_close, leaf_errors, program_of
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except

D, L, E, T = 16, 2, 2, 4


def data():
    x = np.random.default_rng(0).normal(size=(24, T, D)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def staged():
    """Returns a task of two layers in a pipeline."""
    run = sk.pipeline(
        lambda up, rows: rows["x"] @ up,
        lambda x, w, rows: x + jnp.tanh(x @ w),
        lambda x, down, rows: sk.mean(((x @ down - rows["y"]) ** 2).sum((1, 2))),
    )

    def init(key):
        up, layers, down = (normal(seed, *shape) / 4 for seed, shape in enumerate(((D, D), (L, D, D), (D, D))))
        return {"up": up, "layers": {"w": layers}, "down": down}

    loss_fn = lambda params, batch, key: run(params["up"], params["layers"]["w"], params["down"], batch)
    return sk.Task(init, loss_fn, optax.sgd(0.02), train_data=data(), rules=[("layers/w", ["layers", None, None])])


def mixture():
    """Returns a task of one layer of two experts."""

    def init(key):
        experts = {"up": normal(1, E, D, D) / 4, "down": normal(2, E, D, D) / 4}
        return {"router": normal(0, D, E), "experts": experts}

    def loss_fn(params, batch, key):
        y, _ = sk.moe(batch["x"], params["router"], params["experts"], top_k=1, capacity=None)
        return sk.mean(((y - batch["y"]) ** 2).sum((1, 2)))

    rules = [("experts/.*", ["expert", None, None])]
    return sk.Task(init, loss_fn, optax.sgd(0.02), train_data=data(), rules=rules)


OPTIONS = {"sparse_rows": {"sparse_rows": {"leaves": [".*(up|router)"], "rows": 4, "most": None}}}


@functools.cache
def made(axis):
    return {"pipeline": staged, "expert": mixture}[axis]()


def trained(axis, mesh, reducer):
    """Returns (program, parameters before and after two steps) over batches of 16 and 8 rows."""
    program = program_of(made(axis), mesh=mesh, reducer=reducer, batch_size=16, data={"drop_remainder": False})
    state = program.init()
    before = jax.device_get(state.params)
    for _, batch in program.batches(1, 2):
        state, _ = program.step(state, batch)
    return program, before, jax.device_get(state.params)


@functools.cache
def of_sum(axis):
    return trained(axis, {"data": 2}, "sum")[2]


@pytest.mark.parametrize("axis", [pytest.param("expert", marks=pytest.mark.slow), "pipeline"])
@pytest.mark.parametrize("name", slow_except({"int8"}, ROWS))
def test_exact_options_equal_sum_with_stages_and_experts(name, axis):
    mesh, choice = {"replica": 2} if name == "hierarchical" else {}, OPTIONS.get(name, lossless(name))
    mesh |= {"data": 2}
    program, before, found = trained(axis, mesh | {axis: 2}, choice)
    assert program.form == "mapped" and program.reducer.is_sum == (name == "sum")
    expected = trained(axis, mesh, choice)[2] if name in ANOTHER_SUM else of_sum(axis)
    assert_close(found, expected)
    assert min(leaf_errors(found, before).values()) > 1e-3, "it trains"
