"""`warmup: N` of any reducer: the first N steps add by `sum`, in a program of their own; then the reducer does. Chosen
on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.config.load import parse_config
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.target import target_of
from spmdkit.program.restore import restored
from spmdkit.program.step_context import reducer_of
from spmdkit.verify.cases import exact_reducer
from tests.support.forms import slow_except
from tests.support.reducer_runs import adam, bits, loss_fn, program, task, train

WARMUP = 3
MESHES = {
    "manual": {"mesh": {"data": 4}},
    "zero 2": {"mesh": {"data": 2, "fsdp": 2}, "layout": {"zero": 2}},
}


@functools.cache
def made(name, mesh="manual", warmup=0):
    return program(MESHES[mesh], {name: {"warmup": warmup}} if warmup else name, adam())


@pytest.mark.parametrize(
    "name, mesh",
    slow_except([("bfloat16", "manual")], [("bfloat16", "manual"), ("bfloat16", "zero 2"), ("ordered", "manual")]),
)
def test_warmup_steps_use_sum_then_the_reducer(name, mesh):
    warm = made(name, mesh, WARMUP)
    state, _ = train(warm, WARMUP)
    summed, _ = train(made("sum", mesh), WARMUP)
    assert bits((state.params, state.opt_state)) == bits((summed.params, summed.opt_state))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.reducer)), "nothing is owed yet"
    cold = jax.tree.map(jnp.copy, state)
    further, _ = train(warm, 2, state, WARMUP + 1)
    expected, _ = train(made(name, mesh), 2, cold, WARMUP + 1)
    assert bits(further) == bits(expected)
    summed, _ = train(made("sum", mesh), 2, summed, WARMUP + 1)
    assert name == "ordered" or bits(further.params) != bits(summed.params), "the reducer has added"


@pytest.mark.forms(1)
@pytest.mark.parametrize("at", [2, 3, 4])
def test_resume_is_bitwise_around_the_warmup(at, tmp_path):
    warm = made("bfloat16", warmup=WARMUP)
    state, _ = train(warm, at)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at, state, {})
    checkpoints.wait()
    expected, _ = train(warm, 6 - at, state, at + 1)
    state, _, lines = restored(checkpoints, at, warm)
    checkpoints.close()
    assert lines == [] and bits(train(warm, 6 - at, state, at + 1)[0]) == bits(expected)


def test_older_state_returns_into_the_warmup():
    warm = made("bfloat16", warmup=WARMUP)
    state, _ = train(warm, 2)
    early = jax.tree.map(jnp.copy, state)
    train(warm, 3, state, 3)
    again, _ = train(warm, 1, early, 3)
    summed, _ = train(made("sum"), 3)
    assert bits(again.params) == bits(summed.params)


@pytest.mark.slow
def test_groups_that_train_alone_warm_up_too():
    settings = {"mesh": {"replica": 2, "data": 2}, "sync": {"local_sgd": {"every": 2}}}
    choices = {
        name: {"bfloat16": {"error_feedback": False} | extra}
        for name, extra in {"cold": {}, "warm": {"warmup": 2}}.items()
    }
    found = {}
    for name, choice in (choices | {"sum": "sum"}).items():
        made = program(settings, choice, adam())
        state = made.init()
        for _, batch in made.batches(1, 2):
            state, _ = made.step(state, batch)
        found[name] = bits(state.params)
    assert found["warm"] == found["sum"] != found["cold"]


@pytest.mark.slow
def test_learned_count_passes_a_stateful_warmup():
    """Its gradient is a second one, of which the reducer keeps nothing."""

    def weighted(params, batch, key):
        _, metrics = loss_fn(params, batch, key)
        weights = batch["weight"] * jax.nn.sigmoid((batch["x"] @ params["down"]).sum(-1))
        return sk.mean((batch["x"] @ params["down"]).sum(-1) ** 2, weights=weights), metrics

    own = task(optax.sgd(1e-2), loss_fn=weighted)
    warm = program(MESHES["manual"], {"bfloat16": {"warmup": WARMUP}}, own)
    assert bits(train(warm, 2)[0].params) == bits(train(program(MESHES["manual"], "sum", own), 2)[0].params)


def test_one_replica_has_no_warm_up():
    assert program({"mesh": {}}, {"bfloat16": {"warmup": WARMUP}}, adam()).warmup == 0


# ---- planned, explained, proven


def test_plan_has_both_programs_and_names_phases():
    warm = made("bfloat16", warmup=WARMUP)
    document = plan_program(warm, target_of(jax.devices()[:4]))
    large = [row for row in document["collectives"] if row["bytes"] > 256]
    assert {(row["phase"], row["every"], row.get("until"), row["op"]) for row in large} == {
        ("warmup", 1, WARMUP, "all_reduce"),
        ("step", 1, None, "all_to_all"),
        ("step", 1, None, "all_gather"),
    }
    values = sum(x.size for x in jax.tree.leaves(warm.abstract_state.params))
    sent = sum(row["bytes"] for row in document["collectives"] if row["phase"] == "warmup")
    assert sent == pytest.approx(plugins.make("reducers", "sum").wire(values, 4), rel=1e-2)
    steps = sum(row["bytes"] for row in document["collectives"] if row["phase"] == "step")
    assert document["collective_bytes"] == steps, "the sum is that of a later step"
    assert "phase" not in plan_program(made("bfloat16"), target_of(jax.devices()[:4]))["collectives"][0]


def test_what_is_explained_names_the_steps_of_sum():
    assert "sum to step 3, then bfloat16: " in made("bfloat16", warmup=WARMUP).explain()


@pytest.mark.parametrize(
    "choice, proven",
    [
        ({"bfloat16": {"warmup": 5}}, {"bfloat16": {"terms": 3}}),
        ({"ordered": {"warmup": 5}}, "ordered"),
        (
            {"powersgd": {"rank": 2, "warm_start": False, "warmup": 5}},
            {"powersgd": {"rank": 1 << 20, "least": 0, "warm_start": False}},
        ),
        (
            {"hierarchical": {"outer": {"int8": {"error_feedback": False}}, "warmup": 5}},
            {"hierarchical": {"outer": {"int8": {"error_feedback": False, "block": 1}}}},
        ),
    ],
    ids=str,
)
def test_verify_checks_the_reducer_not_its_warmup(choice, proven):
    config = sk.Config(task="t.py:t", reducer=choice, steps=9, mesh={"data": 2})
    assert reducer_of(config).warmup == 5 and exact_reducer(config) == proven


# ---- a user's own, and mistakes

MINE = """
import spmdkit as sk
from jax import lax

@sk.reducer
def twice(warmup_inside=0):
    def apply(leaves, states, over):
        return [2 * lax.psum(x, over.axes) for x in leaves], states
    return sk.Reducer(exact=True, apply=apply, wire=lambda values, num: 0.0, warmup=warmup_inside)

made = twice()
"""


@pytest.mark.parametrize(
    "choice, warmup",
    [
        ({"mine.py:twice": {"warmup": 2}}, 2),
        ({"mine.py:made": {"warmup": 2}}, 2),
        ({"mine.py:twice": {"warmup_inside": 2}}, 2),
        ({"mine.py:twice": {"warmup_inside": 2, "warmup": 1}}, 1),
        ("mine.py:twice", 0),
    ],
    ids=str,
)
def test_user_reducer_warms_up_automatically(choice, warmup, tmp_path, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "spmdkit_task_mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    config = parse_config({"task": "t.py:t", "reducer": choice, "steps": 9}, tmp_path / "config.yaml")
    assert reducer_of(config).warmup == warmup
    proven = parse_config({"task": "t.py:t", "reducer": exact_reducer(config), "steps": 9}, tmp_path / "config.yaml")
    assert reducer_of(proven).warmup == 0


WRONG = {
    "negative": (
        {"bfloat16": {"warmup": -1}},
        r"bfloat16\.warmup is -1\. It is a number of steps, from 0 on\. Write warmup: 100",
    ),
    "a bool": ({"ordered": {"warmup": True}}, r"ordered\.warmup is True\. It is a number of steps"),
    "of an own one": ({"mine.py:twice": {"warmup": "2"}}, r"mine\.py:twice\.warmup is '2'\. It is a number of steps"),
    "of sum": ({"sum": {"warmup": 3}}, r"sum with warmup: 3, steps in which sum is used instead\. Write reducer: sum"),
    "too long": (
        {"bfloat16": {"warmup": 20}},
        r"warmup: 20, and steps is 20: bfloat16 would never add.*Try warmup: 2, or reducer: sum",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_warm_up_is_refused(case):
    choice, match = WRONG[case]
    with pytest.raises(ConfigError, match=match):
        sk.Config(task="t.py:t", reducer=choice, steps=20)
