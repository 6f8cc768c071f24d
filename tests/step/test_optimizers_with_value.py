"""Optimizers that optax gives the loss, or the loss function: those of a plain loop, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.core_runs import assert_close, program_of

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
SETTINGS = {"data": {"shuffle": False}, "batch_size": 16, "steps": 4}
SEARCH = 1e-4
"""Of a line search, which divides by differences of nearly equal numbers: 3e-5 seen after four steps."""
MESHES = {
    "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
    "data 8": {"data": 8},
    "one": {},
}
W0 = {"w": np.linspace(-1, 1, 16, dtype=np.float32), "b": np.full(8, 0.1, np.float32)}
WITH_VALUE = {
    "polyak_sgd": lambda: optax.polyak_sgd(0.3),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.3), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.2)
    ),
    "momo_adam": lambda: optax.contrib.momo_adam(0.3),
}
WITH_FUNCTION = {
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20)),
    "lbfgs": lambda: optax.lbfgs(),
}


def per_example(p, x):
    return (jnp.tanh(x @ p["w"]) + p["b"].sum() - x[:, 0]) ** 2


def task_of(optimizer, **changes):
    given = {"loss_fn": lambda p, b, key: sk.mean(per_example(p, b)), "optimizer": optimizer, "train_data": X}
    return sk.Task(lambda key: jax.tree.map(jnp.asarray, W0), **{**given, **changes})


def losses_and_params(program, steps=4):
    state, losses = program.init(), []
    for _ in range(steps):
        state, metrics = program.step(state, program.put(X))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


@functools.cache
def by_hand(name):
    """Returns (losses, parameters) of a plain loop with optax."""
    optimizer = optax.with_extra_args_support((WITH_VALUE | WITH_FUNCTION)[name]())
    params, losses = jax.tree.map(jnp.asarray, W0), []
    value_fn = lambda p: per_example(p, X).mean()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
        return optax.apply_updates(params, updates), state, value

    for _ in range(4):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses, jax.device_get(params)


def assert_same(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance, atol=1e-7)
    assert_close(found[1], expected[1], tolerance)


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", ["data 8", "data 2 x fsdp 4"])
@pytest.mark.parametrize("name", WITH_VALUE)
def test_optimizer_with_loss_equals_plain_loop(name, mesh):
    program = program_of(task_of(WITH_VALUE[name]()), mesh=MESHES[mesh], **SETTINGS)
    assert_same(losses_and_params(program), by_hand(name))


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", WITH_FUNCTION)
def test_line_search_equals_plain_loop(name, mesh):
    program = program_of(task_of(WITH_FUNCTION[name]()), mesh=MESHES[mesh], **SETTINGS)
    found = losses_and_params(program)
    assert found[0][-1] < found[0][0] - 0.1
    assert_same(found, by_hand(name), SEARCH)


@pytest.mark.forms(1)
@pytest.mark.parametrize("zero", [1, 2])
def test_a_line_search_runs_under_zero_and_microbatches(zero):
    settings = {"mesh": {"data": 2, "fsdp": 4}, "layout": {"zero": zero}, "microbatches": 2}
    assert_same(losses_and_params(program_of(task_of(optax.lbfgs()), **settings, **SETTINGS)), by_hand("lbfgs"), SEARCH)


def test_line_search_sees_fixed_noise_and_model_state():
    def loss(p, state, batch, key):
        noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(sk.example_keys())
        return sk.mean(per_example(p, batch + 0.1 * noise)), {}, {"n": state["n"] + 1.0}

    init = lambda key: sk.Variables(jax.tree.map(jnp.asarray, W0), {"n": jnp.zeros(())})
    found = []
    for mesh in ("one", "data 8"):
        optimizer = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20))
        program = program_of(sk.Task(init, loss, optimizer, train_data=X), mesh=MESHES[mesh], **SETTINGS)
        found.append(losses_and_params(program))
        state, _ = program.step(program.init(), program.put(X))
        assert float(state.model_state["n"]) == 1
    assert_same(found[1], found[0], SEARCH)


def own_step(**extra):
    def step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(lambda p, b, key: sk.mean(per_example(p, b)))(
            state.params, batch, state.key
        )
        given = dict.fromkeys(extra, loss)
        return state.apply_gradients(grads, **given), {"loss": loss, **metrics}

    return step


def test_custom_step_must_pass_the_loss():
    task = task_of(optax.polyak_sgd(0.3), loss_fn=None, train_step=own_step())
    with pytest.raises(
        ConfigError, match=r"apply_gradients: the optimizer needs value .*apply_gradients\(grads, value=loss\)"
    ) as told:
        program_of(task, **SETTINGS)
    assert "TypeError" not in str(told.value)
    task = task_of(optax.polyak_sgd(0.3), loss_fn=None, train_step=own_step(value=True))
    assert_same(losses_and_params(program_of(task, **SETTINGS)), by_hand("polyak_sgd"))


def test_custom_step_must_pass_the_loss_function():
    task = task_of(optax.lbfgs(), loss_fn=None, train_step=own_step(value=True))
    with pytest.raises(ConfigError, match="apply_gradients: the optimizer needs grad, value_fn"):
        program_of(task, **SETTINGS)


def test_a_typeerror_of_the_optimizer_itself_stays_one():
    def update(grads, state, params=None):
        raise TypeError("my own mistake")

    with pytest.raises(Exception, match="my own mistake"):
        program_of(task_of(optax.GradientTransformation(lambda params: optax.EmptyState(), update)), **SETTINGS)
