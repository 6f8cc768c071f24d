"""Two levels: shards of the inner sum, another reducer between the positions along `replica`, and a state that belongs
to the shard."""

import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.communication.reducers.base import ReducedLeaf
from spmdkit.foundation import plugins
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from tests.communication.reducers.test_reducer_contract import wide
from tests.support.core_runs import assert_close
from tests.support.messages import refused
from tests.support.reducer_runs import NUM_VALUES, applied_and_owed, loss_fn, program, task, train, true_sum

MESHES = {
    "tensor inside": {"mesh": {"replica": 2, "data": 2, "tensor": 2}},
    "zero 1": {"mesh": {"replica": 2, "fsdp": 4}, "layout": {"zero": 1}},
    "zero 2, shards of shards": {"mesh": {"replica": 2, "data": 2, "fsdp": 2}, "layout": {"zero": 2}},
    "hsdp": {"mesh": {"replica": 2, "data": 2, "fsdp": 2}},
}


SLOW = ("zero 1", "zero 2, shards of shards", "hsdp")


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.slow if m in SLOW else ()) for m in MESHES])
def test_exact_options_lose_nothing(mesh):
    settings = MESHES[mesh]
    expected = jax.device_get(train(program(settings))[0].opt_state)
    exact, _ = train(program(settings, {"hierarchical": {"outer": {"int8": {"block": 1}}}}))
    assert_close(exact.opt_state, expected)
    state, _ = train(program(settings, "hierarchical"))
    left = jax.tree.map(
        lambda x: np.asarray(x.get("error", 0), np.float64).sum(0) if x else 0.0,
        jax.device_get(state.reducer[0]),
        is_leaf=lambda x: isinstance(x, dict) and set(x) <= {"error"},
    )
    applied = jax.tree.map(lambda x, y: np.asarray(x, np.float64) + y, jax.device_get(state.opt_state), left)
    assert_close(applied, expected)
    assert np.abs(left["up"]).max() > 1e-5


def test_state_belongs_to_shards_or_leaf_is_exact():
    def init(key):
        return {
            "up": jax.random.normal(key, (128, 128)) / 12,
            "down": jax.random.normal(key, (128, 8)) / 12,
            "bias": np.zeros(3),
        }

    def loss(params, batch, key):
        return loss_fn(params | {"bias": params["bias"].sum()}, batch, key)

    settings = {"mesh": {"replica": 2, "data": 4}}
    made = program(settings, "hierarchical", task(init=init, loss_fn=loss, rules=[]))
    state, _ = train(made)
    error = state.reducer[0]["up"]["error"]
    assert error.shape == (2, 128, 128) and {s.data.shape for s in error.addressable_shards} == {(1, 32, 128)}
    assert state.reducer[0]["bias"] == {}
    expected, _ = train(program(settings, "sum", task(init=init, loss_fn=loss, rules=[])))
    assert_close(state.opt_state["bias"], expected.opt_state["bias"])


@pytest.mark.parametrize("num", [2, 4])
def test_outer_sends_its_bytes_for_a_shard(num):
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


def test_per_replica_call_is_sharded_too():
    def step(state, batch):
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss}

    settings = {"mesh": {"replica": 2, "data": 2}}
    own = lambda **more: task(optax.sgd(0.05), loss_fn=None, train_step=step, **more)
    state, _ = train(program(settings, "hierarchical", own(view="replica")), 4)
    expected, _ = train(program(settings, "hierarchical", own()), 4)
    assert_close(state.params, expected.params)
    assert_close(state.reducer, expected.reducer)


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    "outer",
    [
        "sum",
        "sign",
        {"powersgd": {"rank": 2}},
        pytest.param({"topk": {"fraction": 0.25, "most": None}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_reducers_stand_between_the_positions_along_replica(outer):
    settings = {"mesh": {"replica": 2, "data": 4}}
    choice = {"hierarchical": {"outer": outer}}
    expected = true_sum("replica 2 x data 4")
    if outer == "sum":
        assert_close(train(program(settings, choice))[0].opt_state, expected)
    else:
        assert_close(applied_and_owed("replica 2 x data 4", choice), expected)


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
    with refused(parts):
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
    with refused(parts):
        sk.Config(task="t.py:t", reducer={"hierarchical": options})
