"""Two levels: shards of the inner sum, another reducer between the positions along `replica`, and a state that belongs
to the shard."""

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.communication.reducers import hierarchical
from spmdkit.communication.reducers.base import ReducedLeaf
from spmdkit.foundation import plugins
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from tests.support.core_runs import assert_close
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.messages import raises
from tests.support.reducer_runs import (
    NUM_VALUES,
    added_up,
    alone,
    applied_and_owed,
    loss_fn,
    program,
    residuals,
    task,
    train,
    true_sum,
    wide,
)

MESHES = {
    "tensor inside": {"mesh": {"replica": 2, "data": 2, "tensor": 2}},
    "zero 1": {"mesh": {"replica": 2, "fsdp": 4}, "layout": {"zero": 1}},
    "zero 2, shards of shards": {"mesh": {"replica": 2, "data": 2, "fsdp": 2}, "layout": {"zero": 2}},
    "hsdp": {"mesh": {"replica": 2, "data": 2, "fsdp": 2}},
}


@pytest.mark.parametrize("mesh", slow_except((), MESHES))
def test_applied_and_owed_are_the_sum(mesh):
    expected = added_up(program(MESHES[mesh]))[0]
    applied, state = added_up(program(MESHES[mesh], "hierarchical"))
    left = residuals(state)
    assert_close(jax.tree.map(lambda x, y: np.asarray(x, np.float64) + y, applied, left), expected)
    assert np.abs(left["up"]).max() > 1e-5


def test_state_belongs_to_shards_or_leaf_is_exact():
    def init(key):
        return {
            "up": normal(0, 128, 128) / 12,
            "down": normal(1, 128, 8) / 12,
            "bias": np.zeros(3),
        }

    def loss(params, batch, key):
        return loss_fn(params | {"bias": params["bias"].sum()}, batch, key)

    settings = {"mesh": {"replica": 2, "data": 4}}
    made = program(settings, "hierarchical", task(init=init, loss_fn=loss, rules=[]))
    state, _ = train(made, 2)
    error = state.reducer[0]["up"]["error"]
    assert error.shape == (2, 128, 128) and {s.data.shape for s in error.addressable_shards} == {(1, 32, 128)}
    assert state.reducer[0]["bias"] == {}
    expected, _ = train(program(settings, "sum", task(init=init, loss_fn=loss, rules=[])), 2)
    assert_close(state.opt_state["bias"], expected.opt_state["bias"])


def test_leaf_is_sharded_along_its_second_dim():
    terms = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    made = hierarchical.make(outer={"int8": {"block": 1}})
    run = alone(made, axes=("replica", "data"))
    (total,), _ = run([terms], [{"error": np.zeros((4, 3, 4), np.float32)}])
    np.testing.assert_allclose(total, terms.sum(0), rtol=1e-5, atol=1e-6)


def test_outer_sends_its_bytes_for_a_shard(num=2):
    made = program({"mesh": {"replica": 2, "data": num}}, "hierarchical", wide(), batch_size=64, data={})
    bill = read_bill(parse(made.compiled.as_text()), made.sizes)
    sent = {axis: sum(c.bytes for c in bill.collectives if c.axes == (axis,) and c.bytes > 1024) for axis in made.sizes}
    assert sent["replica"] == plugins.make("reducers", "int8").wire(NUM_VALUES // num, 2)
    assert sent["data"] == pytest.approx(2 * (num - 1) / num * 4 * NUM_VALUES, rel=2e-3)
    total = plugins.make("reducers", "hierarchical").bytes_sent(
        [ReducedLeaf("up", (128, 128), {"replica": 2, "data": num}, ())]
    )
    assert sum(sent.values()) == pytest.approx(total, rel=2e-3)
    assert f"{total:.0f} B sent" in made.explain()


@pytest.mark.parametrize("outer", slow_except([], ["sum", "sign", {"powersgd": {"rank": 2}}]), ids=str)
def test_other_reducers_work_between_positions_along_replica(outer):
    mesh, choice = "replica 2 x data 2", {"hierarchical": {"outer": outer}}
    assert_close(applied_and_owed(mesh, choice), true_sum(mesh))


REFUSED = {
    "no replica": (
        {"mesh": {"data": 4}},
        {},
        ("has no effect over replica", "data 4", "{replica: 2, data: 2}", "reducer: sum"),
    ),
    "no inside": (
        {"mesh": {"replica": 4}},
        {},
        ("replica 4 alone", "no data axis", "reducer: int8", "{replica: 2, data: 2}"),
    ),
    "too little for topk": (
        {"mesh": {"replica": 2, "data": 4}},
        {"outer": "topk"},
        ("topk with fraction: 0.01 on 2 replicas", "4,354 values"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mesh_without_two_levels_is_refused(case):
    mesh, options, parts = REFUSED[case]
    with raises(parts):
        program(mesh, {"hierarchical": options} if options else "hierarchical")


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"inner": "int8"}, ("hierarchical.inner is 'int8'", "exact", "Write inner: sum")),
        ({"outer": "hierarchical"}, ("hierarchical.outer is hierarchical", "Write outer: int8")),
        ({"outer": "mine.py:made"}, ("hierarchical.outer is mine.py:made", "of the package")),
        ({"outer": "int9"}, ("hierarchical.outer", "'int9'", "Did you mean 'int8'?")),
        ({"outer": {"int8": {"warmup": 3}}}, ("outer: int8 has warmup: 3", "{hierarchical: {outer: int8, warmup: 3}}")),
        ({"outer": {"int8": {"block": 0}}}, ("hierarchical.outer", "int8.block is 0")),
        ({"outer": 3}, ("hierarchical.outer is 3", "Write outer: int8")),
    ],
    ids=str,
)
def test_a_level_that_is_none_is_refused(options, parts):
    with raises(parts):
        sk.Config(task="t.py:t", reducer={"hierarchical": options})
