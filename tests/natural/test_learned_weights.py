"""Weights that depend on the parameters: the count has a gradient too, and nothing changes where it has none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.forms import slow_except
from tests.support.natural_runs import (
    BATCH,
    MESHES,
    STEPS,
    assert_same_run,
    by_hand,
    keep_gradient,
    num_psums,
    program_of,
    train,
)

DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 6)).astype(np.float32)


def init(key):
    return {"w": jnp.arange(6.0) / 6, "b": jnp.arange(8.0) - 3}


def values_and_weights(params, rows):
    h = rows @ params["w"]
    return (h[:, None] - params["b"]) ** 2, jax.nn.sigmoid(h[:, None] * params["b"])


def weighted(params, rows, key=None):
    values, weights = values_and_weights(params, rows)
    return sk.mean(values, weights=weights) + 0.1 * (params["w"] ** 2).sum(), {"weight": sk.mean(weights)}


def importance(params, rows, key=None):
    """Self-normalised importance weights under a mask of the rows."""
    values, weights = values_and_weights(params, rows)
    return sk.mean(values, where=rows[:, 0] > -1, weights=jnp.exp(weights)) * 2, {}


@functools.cache
def reference(loss_fn):
    def loss(params, rows):
        mean, metrics = loss_fn(params, rows)
        return mean.value, {name: x.value for name, x in metrics.items()}

    return by_hand(loss, init(None), DATA, optax.sgd(1.0))


def task(loss_fn, mesh="one device"):
    rules = [("w", ["mlp"])] if "tensor" in mesh else []
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(1.0)), train_data=DATA, rules=rules)


def test_the_reference_is_the_quotient_written_out():
    def loss(params, rows):
        values, weights = values_and_weights(params, rows)
        return (values * weights).sum() / weights.sum() + 0.1 * (params["w"] ** 2).sum(), {"weight": weights.mean()}

    assert_same_run(reference(weighted), by_hand(loss, init(None), DATA, optax.sgd(1.0)))


CASES = [*((mesh, 1) for mesh in MESHES), ("data 8", 2), ("fsdp 8 zero 2", 2), ("one device", 2)]


@pytest.mark.parametrize(("mesh", "microbatches"), slow_except([("data 8", 2), ("data 2 x fsdp 4", 1)], CASES))
def test_gradient_of_learned_weights_is_the_quotients(mesh, microbatches):
    _, run = train(task(weighted, mesh), mesh, microbatches=microbatches)
    assert_same_run(run, reference(weighted))


@pytest.mark.forms(1)
@pytest.mark.parametrize(("mesh", "remat"), [("data 2 x fsdp 4", "full"), ("one device", "none"), ("data 8", "full")])
def test_importance_weights_with_mask_and_remat_match(mesh, remat):
    _, run = train(task(importance), mesh, remat=remat)
    assert_same_run(run, reference(importance))


@pytest.mark.parametrize("stop", [jax.lax.stop_gradient, lambda w: (w > 0.5).astype(jnp.float32)])
def test_weights_without_a_gradient_send_nothing_more(stop):
    def loss_fn(params, rows, key):
        values, weights = values_and_weights(params, rows)
        return sk.mean(values, weights=stop(weights))

    num_leaves, loss, num_means = 2, 2, 0
    assert num_psums(program_of(task(loss_fn), "data 8")) == num_leaves + loss + num_means
    assert num_psums(program_of(task(weighted), "data 8")) == 2 * num_leaves + loss + 1


def test_canceling_weights_match_jax_and_empty_is_zero():
    values, signs = jnp.arange(4.0), jnp.array([1.0, -1, 1, -1])
    assert float(sk.mean(values, weights=signs).value) == -np.inf
    assert np.isnan(float(sk.mean(jnp.ones(4), weights=signs).value))
    assert np.isnan(float(sk.mean(values, weights=jnp.zeros(4)).value))
    assert float(sk.mean(values, where=jnp.zeros(4, bool), weights=signs).value) == 0
    assert float(sk.mean(values, where=jnp.zeros(4, bool)).value) == 0
    half = sk.mean(values[:2], weights=signs[:2])
    assert float(half.merge(sk.mean(values[2:], weights=signs[2:])).value) == -np.inf
    assert float(half.merge(sk.mean(jnp.full(2, 3.0))).value) == pytest.approx((-1 + 6) / 2)


@pytest.mark.parametrize("mesh", ["data 8", pytest.param("one device", marks=pytest.mark.slow)])
def test_weights_canceling_over_batch_match_everywhere(mesh):
    signs = np.where(np.arange(BATCH) < BATCH // 2, 1.0, -1.0).astype(np.float32)
    data = {"x": DATA[:BATCH], "weight": signs}
    loss_fn = lambda params, rows, key: sk.mean((rows["x"] @ params["w"]) ** 2, weights=rows["weight"])
    own = sk.Task(init, loss_fn, keep_gradient(optax.sgd(1.0)), train_data=data, eval_data=data)
    program, run = train(own, mesh, steps=1)
    assert np.isinf(run.losses[0])
    assert np.isinf(program.eval(program.init())["loss"])


def pipeline_task(weights):
    def head(x, params, rows):
        return sk.mean(x @ params["w"], weights=weights(x @ params["w"]))

    embed = lambda params, rows: rows["x"] * params["w"]
    layer = lambda x, weight, rows: jnp.tanh(x * weight)

    def loss_fn(params, batch, key):
        return sk.pipeline(embed, layer, head)(params["ends"], params["layers"], params["ends"], batch)

    init = lambda key: {"ends": {"w": jnp.arange(6.0) / 6}, "layers": jnp.ones((4, 6)) * 0.8}
    rules = [("layers", ["layers", None])]
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(1.0)), train_data={"x": DATA}, rules=rules)


def test_learned_weights_in_pipeline_head_match_or_fail():
    def loss(params, rows):
        x = rows["x"] * params["ends"]["w"]
        for weight in params["layers"]:
            x = jnp.tanh(x * weight)
        h = x @ params["ends"]["w"]
        return (h * jax.nn.sigmoid(h)).sum() / jax.nn.sigmoid(h).sum(), {}

    learned = pipeline_task(jax.nn.sigmoid)
    right = by_hand(loss, learned.init(None), {"x": DATA}, optax.sgd(1.0))
    stages = lambda schedule: {"mesh": {"pipeline": 2}, "pipeline": {"microbatches": 4, "schedule": schedule}}
    _, run = train(learned, **stages("gpipe"))
    assert_same_run(run, right)
    with pytest.raises(
        ConfigError, match=r"(?s)count of the loss depends on the parameters.*gpipe.*test_learned_weights\.py:\d+"
    ):
        program_of(learned, **stages("1f1b"))
