"""Tasks without `train_data`: the loss makes its own examples."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support import small_runs
from tests.support.core_runs import program_of

MESHES = [{"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}]


def init(key):
    return {"w": 0.3 * jax.random.normal(key, (2, 16)), "v": 0.3 * jax.random.normal(key, (16, 1))}


def residual(params, points):
    return (jnp.tanh(points @ params["w"]) @ params["v"] - jnp.sin(points[:, :1]))[:, 0] ** 2


def loss_fn(params, batch, key):
    points = jax.vmap(lambda k: jax.random.uniform(k, (2,)))(sk.example_keys())
    return sk.mean(residual(params, points)), {"points": sk.sum(points), "first": sk.max(-batch)}


def plain_loss(params, batch, key):
    return sk.mean(residual(params, jax.random.uniform(key, (*batch.shape, 2))))


TASK = sk.Task(init, loss_fn, optax.adam(0.01))


def trained(task=TASK, steps=4, **settings):
    program = program_of(task, steps=steps, batch_size=16, **settings)
    state, found = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        found.append({name: float(x) for name, x in metrics.items()})
    return jax.device_get(state.params), found, program


@pytest.mark.forms(3)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_examples_of_the_loss_are_those_of_one_device(mesh, microbatches):
    params, metrics, _ = trained()
    found, of_mesh, program = trained(mesh=mesh, microbatches=microbatches)
    assert [x["first"] for x in metrics] == [0, -16, -32, -48]
    for one, other in zip(metrics, of_mesh, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, params)
    assert not [note for note in program.notes if "plain key" in note]


def test_draws_from_the_plain_key_are_reported_on_a_mesh():
    task = dataclasses.replace(TASK, loss_fn=plain_loss)
    note = "test_without_data.py:33: loss_fn draws from its plain key, which differs by replica"
    assert not [x for x in program_of(task, batch_size=16).notes if "plain key" in x]
    assert [x for x in program_of(task, batch_size=16, mesh={"data": 4}).notes if note in x]


def test_a_run_without_data_continues_bitwise(tmp_path):
    changes = {"mesh": {"data": 2}, "checkpoint": {"every_steps": 4}}
    whole = small_runs.train(tmp_path / "whole", TASK, steps=8, **changes)
    small_runs.train(tmp_path / "parts", TASK, steps=4, **changes)
    parts = small_runs.train(tmp_path / "parts", TASK, steps=8, **changes)
    jax.tree.map(np.testing.assert_array_equal, parts.state.params, whole.state.params)
    assert not any("epoch" in line for line in small_runs.lines(tmp_path / "whole", "metrics.jsonl"))


@pytest.mark.parametrize(
    "given,text",
    [
        ({"epochs": 3, "steps": None}, "epochs is 3, and the task has no train_data"),
        ({"on_nonfinite": "rollback"}, "on_nonfinite.loss is rollback, and the task has no train_data"),
    ],
)
def test_settings_that_need_data_are_refused(given, text):
    with pytest.raises(ConfigError) as error:
        program_of(TASK, **given)
    assert text in str(error.value)
