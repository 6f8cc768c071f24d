"""Weights of data sets, examples and classes: `grain.MapDataset.mix` and `sk.mean(weights=)`, as in plain JAX."""

import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.core_runs import program_of

MESHES = [{}, {"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}]
RANDOM = np.random.default_rng(0)
DATA = {
    "x": RANDOM.normal(size=(96, 8)).astype(np.float32),
    "label": RANDOM.integers(0, 4, 96).astype(np.int32),
    "weight": RANDOM.uniform(0.1, 3, 96).astype(np.float32),
}
CLASS_WEIGHTS = np.array([0.2, 1.0, 4.0, 2.5], np.float32)
OPTIMIZER = optax.adam(0.02)


def init(key):
    return {"w": 0.1 * jax.random.normal(key, (8, 4))}


def weights_of(kind, batch):
    return batch["weight"] if kind == "example" else jnp.asarray(CLASS_WEIGHTS)[batch["label"]]


def losses(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"], batch["label"])


def trained(program, plain):
    """Returns (the parameters, those of plain JAX on the same batches, losses of both) after five steps."""
    state = program.init()
    params = jax.tree.map(jnp.array, jax.device_get(state.params))
    opt_state, found, wanted = OPTIMIZER.init(params), [], []
    for step, batch in program.batches():
        rows = program.feed.read(step).examples
        state, metrics = program.step(state, batch)
        loss, gradient = jax.value_and_grad(plain)(params, rows)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        found, wanted = [*found, float(metrics["loss"])], [*wanted, float(loss)]
    return jax.device_get(state.params), params, found, wanted


@pytest.mark.forms(4)
@pytest.mark.parametrize("kind", ["example", "class"])
@pytest.mark.parametrize("mesh", MESHES)
def test_weights_of_examples_and_classes_equal_plain_jax(mesh, kind):
    def loss_fn(params, batch, key):
        return sk.mean(losses(params, batch), weights=weights_of(kind, batch))

    def plain(params, rows):
        weights = weights_of(kind, rows)
        return (losses(params, rows) * weights).sum() / weights.sum()

    task = sk.Task(init, loss_fn, OPTIMIZER, train_data=DATA)
    params, wanted, losses_found, losses_wanted = trained(program_of(task, mesh=mesh, microbatches=2), plain)
    np.testing.assert_allclose(losses_found, losses_wanted, rtol=1e-5)
    np.testing.assert_allclose(params["w"], wanted["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2}])
def test_a_mixture_of_data_sets_has_its_weights(mesh):
    def rows(name, num, i):
        return {"x": np.full(8, i / num, np.float32), "label": np.int32(i % 4), "set": np.int32(name)}

    sets = [grain.MapDataset.range(num).map(functools.partial(rows, i, num)) for i, num in enumerate((40, 300))]
    mixture = grain.MapDataset.mix(sets, weights=[0.25, 0.75])

    def loss_fn(params, batch, key):
        return sk.mean(losses(params, batch)), {"first": sk.mean(batch["set"] == 0)}

    program = program_of(sk.Task(init, loss_fn, OPTIMIZER, train_data=mixture), mesh=mesh, batch_size=32)
    plain = lambda params, rows: losses(params, rows).mean()
    params, wanted, losses_found, losses_wanted = trained(program, plain)
    np.testing.assert_allclose(losses_found, losses_wanted, rtol=1e-5)
    np.testing.assert_allclose(params["w"], wanted["w"], rtol=1e-4, atol=1e-6)
    num = program.schedule.steps_per_epoch
    of_first = [program.feed.read(step).examples["set"] == 0 for step in range(1, num + 1)]
    assert num == len(mixture) // 32 and abs(np.mean(of_first) - 0.25) < 0.02
