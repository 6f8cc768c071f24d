"""The recurrent model's own parts: its recurrence is the loop that it stands for, and sees nothing of what comes
after."""

import functools

import jax
import numpy as np
import pytest


@pytest.fixture
def recurrent(load_example):
    return load_example("recurrent")


@pytest.fixture
def params(recurrent):
    sizes = {"width": 16, "layers": 2, "hidden": 24, "context": 12}
    return jax.jit(functools.partial(recurrent.init_params, **sizes))(jax.random.key(0))


def test_the_prefix_sum_is_the_loop_over_positions(recurrent):
    random = np.random.default_rng(0)
    value, update, gate = random.normal(size=(3, 2, 12, 8)).astype(np.float32)
    bias = random.normal(size=8).astype(np.float32)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    h, expected = np.zeros((2, 8)), []
    for t in range(12):
        z = sigmoid(update[:, t] + bias)
        h = (1 - z) * h + z * value[:, t]
        expected.append(gate[:, t] * sigmoid(gate[:, t]) * h)
    found = jax.jit(recurrent.recurrence)(value, update, gate, bias)
    np.testing.assert_allclose(found, np.stack(expected, 1), atol=1e-5)


def test_a_position_sees_all_before_it_alone(recurrent, params):
    weights = jax.tree.map(lambda w: np.asarray(w)[0], params["blocks"])
    part = jax.jit(functools.partial(recurrent.block_part, w=weights))
    x = np.random.default_rng(0).normal(size=(1, 12, 16)).astype(np.float32)
    changed = x.copy()
    changed[:, 5] += 1
    moved = np.abs(part(x) - part(changed)).sum((0, 2)) > 0
    np.testing.assert_array_equal(moved, np.arange(12) >= 5)


def test_memories_span_one_position_to_the_context(params):
    z = 1 / (1 + np.exp(-np.asarray(params["blocks"]["bias"])[0]))
    assert float(z[0]) == pytest.approx(0.5) and float(z[-1]) == pytest.approx(1 / 13)
