"""Backward rules that are not linear in their cotangent: a clipped gradient as in JAX's tutorial, normalized and
quantized cotangents, and float16. They receive the cotangent of the mean over the full batch, as in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.fixed_numbers import normal
from tests.support.natural_runs import (
    BATCH,
    STEPS,
    assert_same_run,
    by_hand,
    keep_gradient,
    num_psums,
    program_of,
    train,
)

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(BATCH * STEPS, 6)).astype(np.float32),
    "y": random.normal(size=BATCH * STEPS).astype(np.float32),
    "keep": random.uniform(size=BATCH * STEPS) < np.linspace(0.2, 0.9, BATCH * STEPS),
}
MESHES = {"one": {}, "data 4": {"data": 4}, "fsdp 4": {"fsdp": 4}, "data 2 x fsdp 2": {"data": 2, "fsdp": 2}}


def rule(backward):
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return identity


RULES = {
    "clipped": rule(lambda g: jnp.clip(g, -1e-2, 1e-2)),
    "normalized": rule(lambda g: g / (jnp.abs(g) + 1e-2)),
    "float8": rule(lambda g: g.astype(jnp.float8_e5m2).astype(g.dtype)),
    "float16": lambda h: h.astype(jnp.float16).astype(jnp.float32),
    "linear": lambda h: h,
}


def init(key):
    return {"w": normal(0, 6, 8) / 2, "v": normal(1, 8) / 2}


def errors(name, params, batch):
    h = RULES[name](batch["x"] @ params["w"])
    return (jnp.tanh(h) @ params["v"] - batch["y"]) ** 2


def loss_of(name, masked):
    return lambda params, batch, key: sk.mean(errors(name, params, batch), where=batch["keep"] if masked else None)


def task_of(name, masked, **more):
    return sk.Task(init, loss_of(name, masked), keep_gradient(optax.sgd(0.1)), train_data=DATA, **more)


def plain(name, masked):
    loss = lambda p, b: (jnp.mean(errors(name, p, b), where=b["keep"] if masked else None), {})
    return by_hand(loss, jax.jit(init)(jax.random.key(0)), DATA, optax.sgd(0.1))


CASES = [(name, masked, mesh, num) for name in RULES for masked in (True, False) for mesh in MESHES for num in (1, 2)]


@pytest.mark.forms(5)
@pytest.mark.parametrize(("name", "masked", "mesh", "microbatches"), CASES)
def test_a_backward_rule_receives_the_cotangent_of_the_mean(name, masked, mesh, microbatches):
    _, run = train(task_of(name, masked), MESHES[mesh], microbatches=microbatches)
    assert_same_run(run, plain(name, masked))


def test_a_short_batch_counts_its_rows_first():
    """40 of 48 rows: the last batch has 8."""
    task = sk.Task(
        init,
        loss_of("clipped", False),
        keep_gradient(optax.sgd(0.1)),
        train_data=jax.tree.map(lambda x: x[:40], DATA),
    )
    program = program_of(task, {"data": 4}, data={"shuffle": False, "drop_remainder": False})
    state, gradient = program.init(), jax.jit(jax.grad(lambda p, rows: errors("clipped", p, rows).mean()))
    for step, batch in program.batches():
        params = jax.device_get(state.params)
        state, _ = program.step(state, batch)
        rows = jax.tree.map(lambda x: x[(step - 1) * BATCH : min(40, step * BATCH)], DATA)  # noqa: B023 - used at once
        expected = gradient(params, rows)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.opt_state[0], expected)


def test_a_replica_step_and_a_reducer_of_means_receive_it():
    def train_step(state, batch):
        (loss, _), grads = sk.value_and_grad(loss_of("clipped", True))(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss}

    more = {"train_step": train_step, "view": "replica"}
    _, run = train(task_of("clipped", True, **more), MESHES["data 4"], microbatches=2)
    assert_same_run(run, plain("clipped", True))
    _, run = train(task_of("clipped", True), MESHES["data 4"], reducer={"int8": {}}, steps=1)
    np.testing.assert_allclose(run.gradient["v"], plain("clipped", True).gradient["v"], rtol=0.1, atol=2e-3)


def test_only_these_losses_add_their_count_first():
    program = {name: program_of(task_of(name, True), MESHES["data 4"]) for name in ("clipped", "float16", "linear")}
    assert num_psums(program["clipped"]) == num_psums(program["float16"]) == num_psums(program["linear"]) + 1
    assert "is added before the backward pass, since 1 / count" in program["clipped"].explain()
    assert "is added before" not in program["linear"].explain()
    assert "is added before" not in program_of(task_of("clipped", False), MESHES["data 4"]).explain()
