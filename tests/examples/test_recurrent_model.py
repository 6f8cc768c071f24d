"""The recurrent model's own parts: its recurrence is the loop that it stands for, and sees nothing of what comes
after."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def recurrent(load_example):
    return load_example("recurrent")


@pytest.fixture
def params(recurrent):
    return recurrent.init_params(jax.random.key(0), width=16, layers=2, hidden=24, context=12)


def test_the_prefix_sum_is_the_loop_over_positions(recurrent):
    keys = jax.random.split(jax.random.key(0), 4)
    value, update, gate = (jax.random.normal(key, (2, 12, 8)) for key in keys[:3])
    bias = jax.random.normal(keys[3], (8,))
    h, expected = np.zeros((2, 8)), []
    for t in range(12):
        z = jax.nn.sigmoid(update[:, t] + bias)
        h = (1 - z) * h + z * value[:, t]
        expected.append(jax.nn.silu(gate[:, t]) * h)
    np.testing.assert_allclose(recurrent.recurrence(value, update, gate, bias), np.stack(expected, 1), atol=1e-5)


def test_a_position_sees_all_that_came_before_and_nothing_after(recurrent, params):
    weights = jax.tree.map(lambda w: w[0], params["blocks"])
    part = functools.partial(recurrent.block_part, w=weights)
    x = jax.random.normal(jax.random.key(1), (1, 12, 16))
    moved = jnp.abs(jax.jacobian(lambda x: part(x).sum((0, 2)))(x)).sum((1, 3)) > 0
    np.testing.assert_array_equal(moved, np.tril(np.ones((12, 12), bool)))


def test_channels_begin_with_memories_of_one_position_to_the_whole_context(params):
    z = jax.nn.sigmoid(params["blocks"]["bias"][0])
    assert float(z[0]) == pytest.approx(0.5) and float(z[-1]) == pytest.approx(1 / 13)
