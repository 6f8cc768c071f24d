"""Rows of a table alone: the sum in every form of step, the rounds as a metric, what crosses, and which tables are
refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.communication.reducers import sparse_rows
from spmdkit.communication.reducers.base import ReducedLeaf
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from tests.support.core_runs import assert_close
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.messages import raises
from tests.support.reducer_runs import program, train

NUM_ROWS, WIDTH, TOKENS = 1000, 16, 3
ROWS = {"sparse_rows": {"leaves": "table", "rows": 8}}


@functools.cache
def words(num=67):
    random = np.random.default_rng(0)
    tokens, y = random.integers(0, NUM_ROWS, (num, TOKENS)), random.normal(size=(num, 8))
    return {"tokens": tokens.astype(np.int32), "y": y.astype(np.float32)}


def loss_fn(params, batch, key):
    h = params["table"][batch["tokens"]].sum(1)
    error = h @ params["head"] + params["bias"] - batch["y"]
    return sk.mean((error**2).sum(-1))


def tied_loss(params, batch, key):
    h = params["table"][batch["tokens"]].sum(1)
    return sk.mean(jax.nn.logsumexp(h @ params["table"].T, -1) + 0 * batch["y"].sum(-1)) + 0 * params["bias"].sum()


def embedding(loss_fn=loss_fn, optimizer=None, **changes):
    def init(key):
        table = normal(0, NUM_ROWS, WIDTH) / 4
        return {"table": table, "head": normal(1, WIDTH, 8) / 4, "bias": jnp.zeros(8)}

    given = {"init": init, "loss_fn": loss_fn, "rules": [("table", [None, "mlp"])], "train_data": words()} | changes
    return sk.Task(optimizer=optimizer or optax.adam(1e-2, eps=1e-3), **given)


TASK = embedding()

FORMS = {
    "manual": {"mesh": {"data": 8}},
    "microbatches, clipped": {"mesh": {"data": 4}, "microbatches": 2, "clip_norm": 0.5},
    "hsdp and tensor": {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}},
    "zero 1": {"mesh": {"fsdp": 4}, "layout": {"zero": 1}},
    "zero 2": {"mesh": {"data": 2, "fsdp": 4}, "layout": {"zero": 2}},
}


@pytest.mark.parametrize("form", slow_except({"hsdp and tensor"}, FORMS))
def test_run_equals_sum_in_every_form(form):
    most = {} if form in ("manual", "microbatches, clipped", "zero 1") else {"most": None}
    rows = {"sparse_rows": ROWS["sparse_rows"] | most}
    expected, losses = train(program(FORMS[form], "sum", TASK), 3)
    state, found = train(program(FORMS[form], rows, TASK), 3)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_close(state.params, expected.params)


def most_touched(batch, replicas):
    """Returns how many rows the replica touches that touches the most."""
    tokens, weight = np.asarray(batch.examples["tokens"]), np.asarray(batch.mask)
    parts = zip(np.split(tokens, replicas), np.split(weight, replicas), strict=True)
    return max(len(np.unique(own[counts])) for own, counts in parts)


def test_rounds_of_a_table_are_a_metric():
    def own_step(state, batch):
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss}

    made = embedding(None, train_step=own_step)
    chosen = program({"mesh": {"data": 4}}, {"sparse_rows": {"leaves": ["tab.*"], "rows": 5, "most": None}}, made)
    state = chosen.init()
    for _, batch in chosen.batches(1, 4):
        expected = -(-most_touched(batch, 4) // 5)
        state, metrics = chosen.step(state, batch)
        assert float(metrics["reducer/rounds/table"]) == max(expected, 1) and expected in (1, 2, 8, 9, 10)


def test_round_sends_formula_bytes_in_one_loop(num=4):
    made = program({"mesh": {"data": num}}, ROWS, TASK)
    bill = read_bill(parse(made.compiled.as_text()), made.sizes)
    in_loop = [c for c in bill.collectives if c.in_loop]
    assert [(c.op, c.dtype, c.bytes) for c in in_loop] == [("all_gather", "u32", None)]
    assert in_loop[0].bytes_at_least == (num - 1) * 4 * 1024  # 8 rows of 16 values, and their numbers
    assert sum(c.op == "all_reduce" for c in bill.collectives) == 2  # the rounds; other leaves with the loss
    leaves = [("bias", (8,)), ("head", (WIDTH, 8)), ("table", (NUM_ROWS, WIDTH))]
    sent = made.reducer.bytes_sent([ReducedLeaf(path, shape, {"data": num}, ()) for path, shape in leaves])
    loss = 8 * (num - 1) / num
    assert bill.bytes is None and bill.bytes_at_least == pytest.approx(sent + loss, abs=loss + 1)


@pytest.mark.slow
def test_a_number_that_is_not_finite_crosses():
    first = words()["tokens"][0, 0]
    poisoned = lambda params, batch, key: sk.mean(
        jnp.where(batch["tokens"][:, 0] == first, jnp.nan, 1.0) * (params["table"][batch["tokens"]] ** 2).sum((1, 2))
    )
    made = program({"mesh": {"data": 4}}, ROWS, embedding(poisoned, optax.sgd(0.1)), on_nonfinite="continue")
    state = made.init()
    for _, batch in made.batches(1, 2):
        state, _ = made.step(state, batch)
    assert np.isnan(np.asarray(state.params["table"])[first]).all()
    assert np.isfinite(np.asarray(state.params["table"])).any()


# ---- refused


def test_dense_table_is_rejected_after_first_batch_only():
    made = program({"mesh": {"data": 8}}, ROWS, embedding(tied_loss))
    state, (_, batch) = made.init(), next(iter(made.batches(1, 1)))
    with raises(
        ("sparse_rows", "first batch", "'table'"),
        ("993 touched rows of 1,000 or more", "125 rounds of 8 rows"),
        "most: 1",
        ("Remove it from sparse_rows.leaves", "reducer: sum"),
    ):
        made.step(state, batch)


@pytest.mark.parametrize(
    "options, assert_parts",
    [
        ({"leaves": "embed"}, ("'embed' matches no leaf", "'table', 'head'", "", "reducer: sum")),
        ({"leaves": ["table", "bias"]}, ("'bias'", "[8] on a device", "no rows", "tables only")),
        ({"leaves": "head"}, ("'head' is [16, 8]", "one round sends", "the limit is 1", "remove it from leaves")),
        ({"rows": 512}, ("rows: 512 on 8 replicas", "[1000, 16]", "(most)", "rows: 128, or remove it from")),
    ],
)
def test_unsuitable_tables_are_rejected_before_first_step(options, assert_parts):
    with raises(*assert_parts):
        program({"mesh": {"data": 8}}, {"sparse_rows": ROWS["sparse_rows"] | options}, TASK)


@pytest.mark.parametrize(
    "options, assert_parts",
    [
        ({"leaves": []}, ("sparse_rows.leaves is []", "whole paths", "Write leaves: [embed]")),
        ({"leaves": "("}, ("'(' is not a valid pattern", "regular expression")),
        ({"rows": 0}, ("sparse_rows.rows is 0", "in a round", "Write rows: 1024")),
        ({"most": 0}, ("sparse_rows.most is 0", "or null", "Write most: 1")),
    ],
)
def test_options_that_are_none_are_refused(options, assert_parts):
    with raises(assert_parts):
        sk.Config(task="t.py:t", reducer={"sparse_rows": ROWS["sparse_rows"] | options})


def test_it_is_refused_where_nobody_hears_its_rounds():
    with raises(("hierarchical.outer is sparse_rows", "metric", "outer: int8")):
        sk.Config(task="t.py:t", reducer={"hierarchical": {"outer": ROWS}})
    with raises(("diloco: its reducer sparse_rows", "outer reducer cannot be logged", "reducer: int8")):
        program({"mesh": {"data": 8}}, "sum", TASK, sync={"diloco": {"every": 4, "reducer": ROWS}})


@pytest.mark.slow
def test_groups_that_train_alone_tell_their_rounds_too():
    made = program({"mesh": {"replica": 2, "data": 4}}, ROWS, TASK, sync={"local_sgd": {"every": 2}})
    state = made.init()
    for _, batch in made.batches(1, 2):
        state, metrics = made.step(state, batch)
        assert 1 <= float(made.metrics(metrics)["reducer/rounds/table"]) <= 3


def test_rows_of_two_words_round_trip():
    values = np.random.default_rng(0).normal(size=(4, 3)) * np.pi
    with jax.enable_x64(True):
        sent = sparse_rows._packed(jnp.arange(4, dtype=jnp.uint32), jnp.asarray(values))
        numbers, found = sparse_rows._unpacked(sent, 4, jnp.zeros((9, 3), jnp.float64))
    assert len(sent) == 1024 and found.dtype == np.float64
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(numbers, range(4))
