"""A metric whose class is the user's, as clu's are, with a `merge` that is no sum: over microbatches, replicas, groups
and batches it is that of all rows."""

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
from tests.support.core_models import regression_data
from tests.support.core_runs import MESHES, ZERO_2_BESIDE_DATA, program_of

ROWS, EVAL_ROWS = 40, 50
"""With batches of 32 the second step has 8 rows, and the second batch of an evaluation 18: some parts are of no row."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Difference:
    """The standard deviation of values, by the parts' counts, means and sums of squares around them (Chan, Golub,
    LeVeque 1979)."""

    count: jax.Array
    mean: jax.Array
    squares: jax.Array

    @classmethod
    def from_model_output(cls, values, mask):
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
class Smallest:
    """The smallest of each column: an array."""

    smallest: jax.Array

    def merge(self, other):
        return Smallest(jnp.minimum(self.smallest, other.smallest))

    def compute(self):
        return self.smallest


def measured(params, batch):
    error = jnp.abs(batch["x"] @ params["w"] - batch["y"])
    mask = sk.example_mask()
    return {
        "deviation": Difference.from_model_output(5 + error[:, 0], mask),
        "smallest": Smallest(jnp.where(mask[:, None], error, jnp.inf).min(0)),
        "variance": sk.derived(lambda part: part.compute() ** 2, Difference.from_model_output(error[:, 0], mask)),
    }


def by_hand(params, rows):
    error = np.abs(rows["x"] @ params["w"] - rows["y"])
    return {"deviation": (5 + error[:, 0]).std(), "smallest": error.min(0), "variance": error[:, 0].var()}


def loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] - batch["y"]
    return sk.mean((error**2).sum(-1)), measured(params, batch)


def global_step(state, batch):
    (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
    assert metrics["deviation"].shape == ()
    return state.apply_gradients(grads), {"loss": loss, **metrics}


def replica_step(state, batch):
    (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
    return state.apply_gradients(grads), {"loss": loss, **sk.pmean(measured(state.params, batch))}


@functools.cache
def task(train_step=None, view="global"):
    return sk.Task(
        lambda key: {"w": jnp.full((16, 8), 0.1)},
        loss_fn,
        optax.sgd(0.05),
        train_data=regression_data(ROWS, 0),
        eval_data=regression_data(EVAL_ROWS, 1),
        rules=[("w", ["embed", "mlp"])],
        **({} if train_step is None else {"train_step": train_step, "view": view}),
    )


def assert_same(found, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), x, rtol=1e-5, atol=1e-6, err_msg=name)


def check(program, steps=2):
    """Fails unless each step's metrics and those of an evaluation are numpy's of all rows."""
    state = program.init()
    one = lambda tree: jax.tree.map(lambda x: x if program.groups is None else x[0], jax.device_get(tree))
    for _, batch in program.batches(stop=steps):
        params, mask = one(state.params), np.asarray(batch.mask)
        rows = {name: np.asarray(x)[mask] for name, x in batch.examples.items()}
        state, metrics = program.step(state, batch)
        assert_same(program.metrics(metrics), by_hand(params, rows))
    assert_same(program.eval(state), by_hand(one(state.params), task().eval_data))


SHORT = {"data": {"drop_remainder": False}, "steps": 2}


@pytest.mark.forms(4)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["one", "data 8", "data 2 x fsdp 2 x tensor 2", "zero 2"])
def test_user_metric_covers_all_rows_on_every_mesh(mesh, microbatches):
    settings = {"one": {"mesh": {}}, "zero 2": ZERO_2_BESIDE_DATA}.get(mesh) or MESHES[mesh]
    check(program_of(task(), microbatches=microbatches, **SHORT, **settings))


@pytest.mark.parametrize("step, view", [(global_step, "global"), (replica_step, "replica")])
def test_a_step_of_the_users_own_returns_it(step, view):
    check(program_of(task(step, view), mesh={"data": 8}, **SHORT))


def test_groups_report_user_metric_over_all_groups():
    check(program_of(task(), mesh={"data": 4}, sync={"local_sgd": {"every": 1}}, **SHORT), steps=1)


def test_parts_are_gathered_once_after_last_microbatch():
    program = program_of(task(), mesh={"data": 8}, microbatches=4, **SHORT)
    gathers = [c for c in read_bill(parse(program.compiled.as_text()), program.sizes).collectives if "gather" in c.op]
    assert gathers and not any(c.in_loop for c in gathers)
    parts = 2 * (1 + 1 + 1 + 1) + (8 + 1)  # with `some` of each
    assert sum(c.bytes_at_least for c in gathers) == 7 * 4 * parts


def refused(match, metric):
    with pytest.raises(ConfigError, match=match):
        program_of(dataclasses.replace(task(), loss_fn=lambda *_: (sk.mean(1.0), {"a": metric})), mesh={})


def test_class_that_changes_shape_is_rejected():
    part = Smallest(jnp.ones(3))
    narrower = dataclasses.make_dataclass("Narrower", ["x"], namespace={"compute": lambda self: self.x})
    narrower.merge = lambda self, other: narrower(self.x[:1])
    refused(
        r"metric 'a' is a Narrower, .* is not a pytree\. .*register_dataclass above Narrower", narrower(part.smallest)
    )
    jax.tree_util.register_dataclass(narrower)
    refused(
        r"metric 'a': merge of Narrower returns something else.*float32\[3\].*float32\[1\]", narrower(part.smallest)
    )
    several = dataclasses.make_dataclass("Several", ["x"], namespace={"compute": lambda self: {"x": self.x}})
    several.merge = lambda self, other: self
    jax.tree_util.register_dataclass(several)
    refused(r"metric 'a': compute of Several returns dict\. .*number or an array", several(part.smallest))
