"""`sk.sum`, `sk.max` and `sk.bincount`: over microbatches, replicas, groups and a whole evaluation what one device
computes from all rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.core_models import regression, regression_loss
from tests.support.core_runs import MESHES, program_of

BINS = 5
ROWS, EVAL_ROWS = 40, 50
"""Rows of the task: with batches of 32 the second step has 8, and the second batch of an evaluation 18."""


def measured(params, batch):
    """Returns one of each metric; the sum and the maximum are negative at all rows, so that a padding row of zeros
    would show."""
    error = jnp.abs(batch["x"] @ params["w"] + params["b"] - batch["y"])
    label = jnp.clip(batch["weight"] * 2, 0, BINS - 1).astype(jnp.int32)
    small = (error[:, 0] < 2).astype(jnp.int32)
    return {
        "total": sk.sum(-1 - error),
        "largest": sk.max(-1 - error.min(-1)),
        "broken": sk.max(jnp.where(batch["weight"] > 2.9, jnp.nan, -1)),
        "table": sk.bincount((label, small), (BINS, 2)),
        "by_label": sk.bincount(label, BINS, weights=error[:, 1]),
        "kept": sk.bincount(label, BINS, where=batch["weight"] > 1),
        "perplexity": sk.derived(jnp.exp, sk.mean(error[:, 0])),
        "f1": sk.derived(f1, sk.bincount((label // 3, small), (2, 2))),
        "by_class": sk.derived(lambda c: c[:, 1] / jnp.maximum(c.sum(1), 1), sk.bincount((label, small), (BINS, 2))),
        "spread": sk.derived(lambda mean, most: most - mean, sk.mean(error[:, 0]), sk.max(error[:, 0])),
        "own": sk.derived(Average.compute, Average.of(error[:, 1], sk.example_mask())),
        "norm": sk.scalar(jnp.abs(params["w"]).sum()),
    }


def f1(counts):
    """Of a table [label, prediction]."""
    return 2 * counts[1, 1] / (2 * counts[1, 1] + counts[0, 1] + counts[1, 0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Average:
    """A metric as clu's and nnx's are: arrays that add, and `compute`."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values, mask):
        return cls(jnp.where(mask, values, 0).sum(), mask.sum(dtype=jnp.float32))

    def compute(self):
        return self.total / self.count


def by_hand(params, rows):
    """Returns the same of all rows, with numpy."""
    error = np.abs(rows["x"] @ params["w"] + params["b"] - rows["y"])
    label = np.clip(rows["weight"] * 2, 0, BINS - 1).astype(int)
    table, by_label = np.zeros((BINS, 2), int), np.zeros(BINS)
    np.add.at(table, (label, (error[:, 0] < 2).astype(int)), 1)
    np.add.at(by_label, label, error[:, 1])
    kept = np.bincount(label[rows["weight"] > 1], minlength=BINS)
    largest = {
        "largest": (-1 - error.min(-1)).max(),
        "broken": np.nan if (rows["weight"] > 2.9).any() else -1,
    }
    table2 = np.zeros((2, 2))
    np.add.at(table2, (label // 3, (error[:, 0] < 2).astype(int)), 1)
    finished = {
        "perplexity": np.exp(error[:, 0].mean()),
        "f1": f1(table2),
        "by_class": table[:, 1] / np.maximum(table.sum(1), 1),
        "spread": error[:, 0].max() - error[:, 0].mean(),
        "own": error[:, 1].mean(),
        "norm": np.abs(params["w"]).sum(),
    }
    return largest | finished | {"total": (-1 - error).sum(), "table": table, "by_label": by_label, "kept": kept}


def loss_fn(params, batch, key):
    loss, metrics = regression_loss(params, batch, key)
    return loss, metrics | measured(params, batch)


@functools.cache
def task():
    return dataclasses.replace(regression(ROWS, EVAL_ROWS), loss_fn=loss_fn)


def assert_same(found, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), x, rtol=1e-5, err_msg=name)


def check_steps(program, rows_of_step=lambda number: slice(None)):
    """Two steps, the second one short, and an evaluation, each against numpy at the parameters of that moment."""
    state = program.init()
    data, eval_data = task().train_data, task().eval_data
    for number, batch in program.batches(stop=2):
        params = jax.device_get(state.params)
        params = params if program.groups is None else jax.tree.map(lambda x: x[0], params)
        rows = {name: np.asarray(x)[np.asarray(batch.mask)] for name, x in jax.device_get(batch.examples).items()}
        assert len(rows["x"]) == (32 if number == 1 else 8) < len(data["x"])
        state, metrics = program.step(state, batch)
        metrics = program.metrics(metrics)
        if program.groups is None or number == 1:
            assert_same(metrics, by_hand(params, rows))
        assert metrics["table"].shape == (BINS, 2) and metrics["table"].dtype == jnp.int32
    if program.groups is None:
        found = program.eval(state)
        assert_same(found, by_hand(jax.device_get(state.params), eval_data))
        assert isinstance(found["largest"], float) and isinstance(found["table"], np.ndarray)


SHORT = {"data": {"drop_remainder": False}, "steps": 2}


@pytest.mark.forms(4)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["one", "data 8", "fsdp 8 zero 3", "data 2 x fsdp 2 x tensor 2"])
def test_aggregates_cover_all_rows_on_every_mesh(mesh, microbatches):
    settings = {"mesh": {}} if mesh == "one" else MESHES[mesh]
    check_steps(program_of(task(), microbatches=microbatches, **SHORT, **settings))


def test_ordered_reducer_gives_the_same_aggregates():
    check_steps(program_of(task(), mesh={"data": 8}, reducer="ordered", **SHORT))


def test_groups_report_aggregates_over_all_groups():
    check_steps(program_of(task(), mesh={"data": 4, "fsdp": 2}, sync={"local_sgd": {"every": 2}}, **SHORT))


def test_a_step_of_the_users_returns_them():
    def global_step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        assert isinstance(metrics["table"], sk.Bincount) and metrics["largest"].shape == ()
        own = {"own": sk.bincount((batch["weight"] > 1).astype(jnp.int32), 2), "least": -sk.max(-batch["weight"]).value}
        return state.apply_gradients(grads), {"loss": loss, **metrics, **own}

    def replica_step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        own = sk.pmean(
            {"own": sk.bincount((batch["weight"] > 1).astype(jnp.int32), 2), "least": sk.max(-batch["weight"])}
        )
        return state.apply_gradients(grads), {"loss": loss, **metrics, **own, "least": -own["least"].value}

    for view, step in (("global", global_step), ("replica", replica_step)):
        own = dataclasses.replace(task(), train_step=step, view=view, loss_fn=None, eval_data=None)
        program = program_of(own, mesh={"data": 8}, **SHORT)
        state = program.init()
        params = jax.device_get(state.params)
        for _, batch in program.batches(stop=1):
            rows = jax.device_get(batch.examples)
            _, metrics = program.step(state, batch)
        many = int((rows["weight"] > 1).sum())
        expected = {"own": [32 - many, many], "least": rows["weight"].min()}
        assert_same(metrics, by_hand(params, rows) | expected)


# ---- by hand

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3) - 20


def test_padding_and_where_leave_rows_out():
    with sk.examples(4, mask=jnp.array([True, True, False, False])):
        assert float(sk.sum(VALUES).value) == VALUES[:2].sum()
        assert float(sk.max(VALUES).value) == VALUES[1, 2]
        assert float(sk.max(VALUES, where=np.array([True, False, True, True])).value) == VALUES[0, 2]
        assert sk.bincount(np.array([0, 1, 1, 1]), 3).value.tolist() == [1, 1, 0]
        with pytest.raises(ConfigError, match=r"sk\.max got values of shape \(3, 4\).*padding"):
            sk.max(VALUES.T)
    assert float(sk.max(VALUES, where=np.zeros(4, bool)).value) == -np.inf
    assert np.isnan(float(sk.max(np.array([1.0, np.nan])).merge(sk.max(2.0)).value))


def test_indices_outside_are_not_counted():
    assert sk.bincount(np.array([-1, 0, 2, 3]), 3).value.tolist() == [1, 0, 1]
    assert sk.bincount(np.array([[0, 1], [1, 1]]), 2).value.tolist() == [1, 3]


def test_parts_merge():
    for fn in (sk.sum, sk.max):
        assert float(fn(VALUES[:1]).merge(fn(VALUES[1:])).value) == float(fn(VALUES).value)
    parts = sk.bincount(np.array([0, 1]), 2).merge(sk.bincount(np.array([1]), 2))
    assert parts.value.tolist() == [1, 2]


def test_counts_take_integers_one_array_for_each_dim():
    with pytest.raises(ConfigError, match=r"indices of shapes \[\(2,\)\] for counts of shape \(2, 2\).*Write"):
        sk.bincount(np.array([0, 1]), (2, 2))
    with pytest.raises(ConfigError, match=r"dtype float32.*astype"):
        sk.bincount(np.ones(2, np.float32), 2)


def refused(match, **changes):
    with pytest.raises(ConfigError, match=match):
        program_of(dataclasses.replace(task(), **changes), mesh={})


def test_aggregates_are_no_loss_and_must_merge():
    refused(r"loss_fn returned a sk\.sum of shape \(\) as its loss.*sk\.mean", loss_fn=lambda *_: sk.sum(1.0))
    asked = r"metric 'a' as .*3.*A metric is a sk\.mean, sk\.sum, sk\.max or sk\.bincount"
    refused(asked, loss_fn=lambda *_: (sk.mean(1.0), {"a": jnp.ones(3)}))
    refused(asked, loss_fn=lambda *_: (sk.mean(1.0), {"a": sk.Sum(jnp.ones(3))}))
    refused(asked, train_step=lambda state, batch: (state, {"a": jnp.ones(3)}), loss_fn=None)
