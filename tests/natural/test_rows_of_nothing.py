"""`sk.sharded_arange`: what a global `train_step` makes of no batch, shared out over the replicas; the numbers of plain
JAX, and a part of the work on each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, STEPS, leaf_errors, program_of
from tests.support.tasks import step_key

NUM = 64
DATA = np.zeros((BATCH * STEPS, 2), np.float32)


def init(key):
    return {"w": normal(0, 2, 8) / 2, "v": jnp.full(8, 0.3)}


def residual(params, key, places):
    """Returns the squared residual of v . tanh(w x) = |x|^2 at a random point for each place, [N]."""
    points = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (2,)))(places)
    return (jnp.tanh(points @ params["w"]) @ params["v"] - (points**2).sum(-1)) ** 2


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: residual(p, state.key, sk.sharded_arange(NUM)).mean())(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def by_hand():
    of = lambda params, key: residual(params, key, jnp.arange(NUM, dtype=jnp.int32)).mean()
    value_and_grad = jax.jit(jax.value_and_grad(of))
    params, losses = jax.jit(init)(jax.random.key(0)), []
    for step in range(STEPS):
        loss, grads = value_and_grad(params, step_key(step))
        params, losses = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), [*losses, float(loss)]
    return params, losses


@pytest.mark.parametrize("mesh", slow_except(["data 2 x fsdp 4"], ["one device", "data 8", "data 2 x fsdp 4"]))
def test_generated_points_equal_one_device(mesh):
    program = program_of(sk.Task(init, train_step=train_step, optimizer=optax.sgd(0.1), train_data=DATA), mesh)
    state, losses = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    params, expected = by_hand()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert max(leaf_errors(jax.device_get(state.params), jax.device_get(params)).values()) < 1e-5
    on_a_device = f"f32[{NUM if mesh == 'one device' else NUM // 8},"
    assert on_a_device in program.compiled.as_text()
    assert mesh == "one device" or f"f32[{NUM}," not in program.compiled.as_text()
