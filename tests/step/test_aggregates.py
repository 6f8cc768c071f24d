"""Metrics, also of user-defined classes, equal numpy's of all rows over microbatches, replicas, groups and a whole
evaluation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
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
    small, mask = (error[:, 0] < 2).astype(jnp.int32), sk.example_mask()
    return {
        "total": sk.sum(-1 - error),
        "largest": sk.max(-1 - error.min(-1)),
        "broken": sk.max(jnp.where(batch["weight"] > 2.9, jnp.nan, -1)),
        "table": sk.bincount((label, small), (BINS, 2)),
        "by_label": sk.bincount(label, BINS, weights=error[:, 1]),
        "f1": sk.derived(f1, sk.bincount((label // 3, small), (2, 2))),
        "spread": sk.derived(lambda mean, most: most - mean, sk.mean(error[:, 0]), sk.max(error[:, 0])),
        "own": sk.derived(jnp.divide, jnp.where(mask, error[:, 1], 0).sum(), mask.sum(dtype=jnp.float32)),
        "norm": sk.scalar(jnp.abs(params["w"]).sum()),
        "deviation": Difference.of(5 + error[:, 0], mask),
        "smallest": Smallest(jnp.where(mask[:, None], error, jnp.inf).min(0)),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Difference:
    """The standard deviation of values, from counts, means and sums of squares (Chan, Golub, LeVeque 1979)."""

    count: jax.Array
    mean: jax.Array
    squares: jax.Array

    @classmethod
    def of(cls, values, mask):
        count = mask.sum(dtype=jnp.float32)
        mean = jnp.where(mask, values, 0).sum() / count.clip(1)
        return cls(count, mean, jnp.where(mask, (values - mean) ** 2, 0).sum())

    def merge(self, other):
        count = (self.count + other.count).clip(1)
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return Difference(self.count + other.count, mean, squares)

    def compute(self):
        return jnp.sqrt(self.squares / self.count.clip(1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Added:
    """A class that adds its parts, as most of clu's do."""

    total: jax.Array
    count: jax.Array

    def merge(self, other):
        return Added(jnp.add(self.total, other.total), other.count + self.count)

    def compute(self):
        return self.total


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Smallest:
    """The smallest of each column: an array."""

    smallest: jax.Array

    def merge(self, other):
        return Smallest(jnp.minimum(self.smallest, other.smallest))

    def compute(self):
        return self.smallest


def f1(counts):
    """Of a table [label, prediction]."""
    return 2 * counts[1, 1] / (2 * counts[1, 1] + counts[0, 1] + counts[1, 0])


def by_hand(params, rows):
    """Returns the same of all rows, with numpy."""
    error = np.abs(rows["x"] @ params["w"] + params["b"] - rows["y"])
    label = np.clip(rows["weight"] * 2, 0, BINS - 1).astype(int)
    table, by_label = np.zeros((BINS, 2), int), np.zeros(BINS)
    np.add.at(table, (label, (error[:, 0] < 2).astype(int)), 1)
    np.add.at(by_label, label, error[:, 1])
    largest = {
        "largest": (-1 - error.min(-1)).max(),
        "broken": np.nan if (rows["weight"] > 2.9).any() else -1,
    }
    table2 = np.zeros((2, 2))
    np.add.at(table2, (label // 3, (error[:, 0] < 2).astype(int)), 1)
    finished = {
        "f1": f1(table2),
        "spread": error[:, 0].max() - error[:, 0].mean(),
        "own": error[:, 1].mean(),
        "norm": np.abs(params["w"]).sum(),
        "deviation": (5 + error[:, 0]).std(),
        "smallest": error.min(0),
    }
    return largest | finished | {"total": (-1 - error).sum(), "table": table, "by_label": by_label}


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


@functools.cache
def program_with_short_batches(mesh, microbatches):
    return program_of(task(), microbatches=microbatches, **SHORT, **MESHES[mesh])


@pytest.mark.forms(1)
@pytest.mark.parametrize("microbatches", [4, 1])
@pytest.mark.parametrize("mesh", ["data 8", "data 2 x fsdp 4 zero 2", "data 2 x fsdp 2 x tensor 2"])
def test_aggregates_cover_all_rows_on_every_mesh(mesh, microbatches):
    check_steps(program_with_short_batches(mesh, microbatches))


def test_groups_report_aggregates_over_all_groups():
    check_steps(program_of(task(), mesh={"data": 4, "fsdp": 2}, sync={"local_sgd": {"every": 2}}, **SHORT))


def test_parts_are_gathered_once_after_last_microbatch():
    program = program_with_short_batches("data 8", 4)
    gathers = [c for c in read_bill(parse(program.compiled.as_text()), program.sizes).collectives if "gather" in c.op]
    assert gathers and not any(c.in_loop for c in gathers)
    parts = (1 + 1 + 1 + 1) + (8 + 1)  # with `some` of each
    assert sum(c.bytes_at_least for c in gathers) == 7 * 4 * parts


def test_user_steps_return_metrics_over_all_rows():
    def global_step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        assert isinstance(metrics["table"], sk.Bincount) and metrics["largest"].shape == ()
        own = {"own": sk.bincount((batch["weight"] > 1).astype(jnp.int32), 2), "least": -sk.max(-batch["weight"]).value}
        return state.apply_gradients(grads), {"loss": loss, **metrics, **own}

    def replica_step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        own = {"own": sk.bincount((batch["weight"] > 1).astype(jnp.int32), 2), "least": sk.max(-batch["weight"])}
        part = Difference.of(batch["weight"], sk.example_mask())
        own = sk.pmean(own | {"part": part, "of_part": sk.derived(lambda part: part.compute() ** 2, part)})
        return state.apply_gradients(grads), {"loss": loss, **metrics, **own, "least": -own["least"].value}

    for view, step in (("global", global_step), ("replica", replica_step)):
        own = dataclasses.replace(task(), train_step=step, view=view, loss_fn=None, eval_data=None)
        program = program_of(own, mesh={"data": 8}, steps=1)
        state = program.init()
        params = jax.device_get(state.params)
        for _, batch in program.batches(stop=1):
            rows = jax.device_get(batch.examples)
            _, metrics = program.step(state, batch)
        many = int((rows["weight"] > 1).sum())
        expected = {"own": [32 - many, many], "least": rows["weight"].min()}
        if view == "replica":
            expected |= {"part": rows["weight"].std(), "of_part": rows["weight"].var()}
        assert_same(metrics, by_hand(params, rows) | expected)


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh", [{}, {"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}])
def test_long_evaluation_is_exact(mesh):
    """More than 2**31 elements in 400 batches: sums in float32 lose units after 2**24, counts in int32 wrap."""
    weight = (99_991 + 2 * np.arange(3199) % 997).astype(np.float32)

    def eval_fn(params, batch):
        mask = sk.example_mask()
        whole = jnp.where(mask, batch["weight"], 0).astype(jnp.int32).sum()
        ones = jnp.ones_like(batch["weight"])
        return {
            "mean": sk.mean(0.1 * ones, weights=batch["weight"]),
            "sum": sk.sum(batch["weight"]),
            "largest": sk.max(batch["weight"]),
            "table": sk.bincount(whole % 1 + jnp.zeros(len(ones), jnp.int32), 1, weights=batch["weight"]),
            "added": Added(jnp.where(mask, batch["weight"], 0).sum(), whole),
            "derived": sk.derived(lambda tenfold: tenfold, whole * 10),
        }

    params = lambda key: jnp.zeros(())
    loss_fn = lambda params, batch, key: sk.mean(params * batch["weight"])
    data = {"weight": weight}
    own = sk.Task(params, loss_fn, optax.sgd(0.1), train_data=data, eval_data=data, eval_fn=eval_fn)
    program = program_of(own, mesh=mesh, batch_size=8)
    found, total = program.eval(program.init()), int(weight.sum(dtype=np.float64))
    assert found["sum"] == found["table"][0] == total and found["largest"] == weight.max()
    assert found["derived"] == 10 * total > 2**31
    assert found["added"] == total
    assert found["mean"] == pytest.approx(np.float32(0.1), rel=1e-7)


# ---- by hand

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3) - 20


def test_padding_and_where_leave_rows_out():
    def values():
        with sk.examples(4, mask=jnp.array([True, True, False, False])):
            where = np.array([True, False, True, True])
            parts = sk.sum(VALUES), sk.max(VALUES), sk.max(VALUES, where=where), sk.bincount(np.array([0, 1, 1, 1]), 3)
        nan = sk.max(np.array([1.0, np.nan])).merge(sk.max(2.0))
        return [part.value for part in (*parts, sk.max(VALUES, where=np.zeros(4, bool)), nan)]

    total, largest, largest_where, counts, of_none, nan = jax.jit(values)()
    assert (total, largest, largest_where) == (VALUES[:2].sum(), VALUES[1, 2], VALUES[0, 2])
    assert counts.tolist() == [1, 1, 0] and of_none == -np.inf and np.isnan(nan)
    padding = pytest.raises(ConfigError, match=r"sk\.max got values of shape \(3, 4\).*padding")
    with sk.examples(4, mask=jnp.array([True, True, False, False])), padding:
        sk.max(VALUES.T)


def test_indices_outside_are_not_counted():
    counts = jax.jit(lambda: [sk.bincount(np.array([-1, 0, 2, 3]), 3), sk.bincount(np.array([[0, 1], [1, 1]]), 2)])()
    assert [part.value.tolist() for part in counts] == [[1, 0, 1], [1, 3]]


def test_parts_merge():
    @jax.jit
    def merged():
        halves = [fn(VALUES[:1]).merge(fn(VALUES[1:])) for fn in (sk.sum, sk.max)]
        return halves, sk.bincount(np.array([0, 1]), 2).merge(sk.bincount(np.array([1]), 2))

    (total, largest), counts = merged()
    assert total.value == VALUES.sum() and largest.value == VALUES.max() and counts.value.tolist() == [1, 2]


def test_counts_take_integers_one_array_for_each_dim():
    with pytest.raises(ConfigError, match=r"indices of shapes \[\(2,\)\] for counts of shape \(2, 2\).*Write"):
        sk.bincount(np.array([0, 1]), (2, 2))
    with pytest.raises(ConfigError, match=r"dtype float32.*astype"):
        sk.bincount(np.ones(2, np.float32), 2)


def refused(match, **changes):
    with pytest.raises(ConfigError, match=match):
        program_of(dataclasses.replace(task(), **changes), mesh={})


def test_class_that_changes_shape_is_rejected():
    part = Smallest(jnp.ones(3))
    narrower = dataclasses.make_dataclass("Narrower", ["x"], namespace={"compute": lambda self: self.x})
    narrower.merge = lambda self, other: narrower(self.x[:1])
    refused_metric(
        r"metric 'a' is a Narrower, .* is not a pytree\. .*register_dataclass above Narrower", narrower(part.smallest)
    )
    jax.tree_util.register_dataclass(narrower)
    refused_metric(
        r"metric 'a': merge of Narrower returns a metric of another form.*float32\[3\].*float32\[1\]",
        narrower(part.smallest),
    )
    several = dataclasses.make_dataclass("Several", ["x"], namespace={"compute": lambda self: {"x": self.x}})
    several.merge = lambda self, other: self
    jax.tree_util.register_dataclass(several)
    refused_metric(r"metric 'a': compute of Several returns dict\. .*number or an array", several(part.smallest))


def refused_metric(match, metric):
    refused(match, loss_fn=lambda *_: (sk.mean(1.0), {"a": metric}))


def test_aggregates_are_no_loss_and_must_merge():
    refused(r"loss_fn returned an sk\.sum of shape \(\) as its loss.*sk\.mean", loss_fn=lambda *_: sk.sum(1.0))
    asked = r"metric 'a' as .*3.*A metric is an sk\.mean, sk\.sum, sk\.max or sk\.bincount"
    refused(asked, loss_fn=lambda *_: (sk.mean(1.0), {"a": jnp.ones(3)}))
    refused(asked, loss_fn=lambda *_: (sk.mean(1.0), {"a": sk.Sum(jnp.ones(3))}))
    refused(asked, train_step=lambda state, batch: (state, {"a": jnp.ones(3)}), loss_fn=None)
