"""A loss that is a sum of means with counts of their own: of the masked tokens, of the sentences, of a penalty."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
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
    "x": random.normal(size=(BATCH * STEPS, 5, 6)).astype(np.float32),
    "masked": random.uniform(size=(BATCH * STEPS, 5)) < np.linspace(0.05, 0.9, BATCH * STEPS)[:, None],
    "is_next": random.integers(0, 2, BATCH * STEPS).astype(np.float32),
}


def init(key):
    names = ["tokens", "sentence", "confidence"]
    return {name: normal(seed, 6) / 2 for seed, name in enumerate(names)}


def terms(params, batch):
    """Returns (loss of each token [B, T], of each sentence [B], weights of sentences [B])."""
    tokens = (jnp.tanh(batch["x"] @ params["tokens"]) - batch["x"][..., 0]) ** 2
    pooled = batch["x"].mean(1)
    sentence = jax.nn.softplus(pooled @ params["sentence"]) - batch["is_next"] * (pooled @ params["sentence"])
    return tokens, sentence, jax.nn.sigmoid(pooled @ params["confidence"])


def of_shapes(params, batch, key):
    tokens, sentence, _ = terms(params, batch)
    return sk.mean(tokens) + 0.5 * sk.mean(sentence), {}


def mlm_and_nsp(params, batch, key):
    tokens, sentence, _ = terms(params, batch)
    mlm, nsp = sk.mean(tokens, where=batch["masked"]), sk.mean(sentence)
    return mlm + 0.5 * nsp + 0.1 * sk.scalar(optax.tree.norm(params)), {"mlm": mlm, "nsp": nsp, "both": mlm + nsp}


def learned(params, batch, key):
    """Weights that are learned: the count has a gradient of its own."""
    tokens, sentence, weights = terms(params, batch)
    return sk.mean(tokens, where=batch["masked"]) - sk.mean(sentence, weights=weights) / 2 + 1.0, {}


def by_numpy(loss_fn):
    def plain(params, batch):
        tokens, sentence, weights = terms(params, batch)
        mlm = jnp.mean(tokens, where=batch["masked"])
        if loss_fn is of_shapes:
            return tokens.mean() + 0.5 * sentence.mean(), {}
        if loss_fn is learned:
            return mlm - (sentence * weights).sum() / weights.sum() / 2 + 1.0, {}
        metrics = {"mlm": mlm, "nsp": sentence.mean(), "both": mlm + sentence.mean()}
        return mlm + 0.5 * sentence.mean() + 0.1 * optax.tree.norm(params), metrics

    return plain


def task_of(loss_fn, **more):
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=DATA, **more)


@pytest.mark.forms(3)
@pytest.mark.parametrize(
    ("loss_fn", "mesh", "microbatches"),
    [
        (of_shapes, "data 8", 2),
        (mlm_and_nsp, "one device", 1),
        (mlm_and_nsp, "data 8", 1),
        (mlm_and_nsp, "data 2 x fsdp 4", 2),
        (mlm_and_nsp, "fsdp 8 zero 2", 1),
        (learned, "one device", 4),
        (learned, "replica 2 x data 4", 1),
        (learned, "data 8", 2),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_each_mean_is_divided_by_its_own_count(loss_fn, mesh, microbatches):
    _, run = train(task_of(loss_fn), mesh, microbatches=microbatches)
    assert_same_run(run, by_hand(by_numpy(loss_fn), init(jax.random.key(0)), DATA, optax.sgd(0.1)))


def test_a_short_batch_counts_what_it_has():
    """40 of 48 rows: the last batch has 8, in training and in the evaluation."""
    data = jax.tree.map(lambda x: x[:40], DATA)
    task = sk.Task(init, mlm_and_nsp, keep_gradient(optax.sgd(0.1)), train_data=data, eval_data=data)
    program = program_of(task, "data 8", data={"shuffle": False, "drop_remainder": False})
    state, plain = program.init(), jax.jit(by_numpy(mlm_and_nsp))
    for step, batch in program.batches():
        params = jax.device_get(state.params)
        state, metrics = program.step(state, batch)
        rows = jax.tree.map(lambda x: x[(step - 1) * BATCH : step * BATCH], data)  # noqa: B023 - used at once
        expected, _ = plain(params, rows)
        np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-5)
    expected, more = plain(jax.device_get(state.params), data)
    found = program.eval(state)
    np.testing.assert_allclose([found["loss"], found["both"]], [expected, more["both"]], rtol=1e-5)


def test_counts_that_follow_from_shapes_cross_nothing_more():
    sums = {fn: num_psums(program_of(task_of(fn), "data 8")) for fn in (of_shapes, mlm_and_nsp)}
    alone = num_psums(program_of(task_of(lambda p, b, k: sk.mean(terms(p, b)[0])), "data 8"))
    assert sums[of_shapes] == alone + 1  # the sum of the second mean; counts are known
    assert sums[mlm_and_nsp] > sums[of_shapes]


def test_a_sum_of_means_computes_as_others_do():
    a, b = sk.mean(np.arange(4.0)), sk.mean(np.full(2, 3.0))
    for found, value in [
        (a + b, 4.5),
        (b + a, 4.5),
        (a - b, -1.5),
        (2 * (a + b), 9),
        ((a + b) / 2, 2.25),
        (-(a + b), -4.5),
        (a + b + 1, 5.5),
        (1 - (a + b), -3.5),
        ((a + b) - (a + b), 0),
        (sum([a, b, a]), 6),
        ((a + b).merge(b + a), 12 / 6 + 12 / 6),
    ]:
        assert float(found.value) == pytest.approx(value)
    with pytest.raises(TypeError, match="scalars only"):
        (a + b) * np.ones(3)
    with pytest.raises(ConfigError, match=r"sk.scalar got an array of shape \(3,\)"):
        sk.scalar(np.ones(3))
