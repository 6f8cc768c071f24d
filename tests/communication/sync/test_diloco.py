"""`sync: diloco`: an outer optimizer on the moves of groups, as in a loop written by hand; in few bytes; onto other
groups and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.communication.reducers.int8 import make as int8
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.target import target_of
from spmdkit.program.restore import restored
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close, leaf_errors, program_of
from tests.support.forms import slow_except
from tests.support.messages import assert_parts, raises
from tests.support.reducer_runs import bits, task
from tests.support.sync_runs import MESHES, NESTEROV, adam, diloco_by_hand, group, mean_of_groups, program, train

ADAM = {"name": "adam", "learning_rate": 3e-3, "eps": 1e-3}


def diloco(mesh="data 4", **options):
    return program({"diloco": {"every": 3} | options}, mesh)


@functools.cache
def on_data():
    return diloco()


@pytest.mark.parametrize(
    "mesh, optimizer",
    slow_except([("replica 2 x fsdp 2 x tensor 2", None)], [*((mesh, None) for mesh in MESHES), ("data 4", ADAM)]),
)
def test_it_is_a_loop_written_by_hand(mesh, optimizer):
    made = diloco(mesh, **({"optimizer": optimizer} if optimizer else {}))
    state, _ = train(made, 8)
    outer = optax.adam(3e-3, eps=1e-3) if optimizer else NESTEROV
    params, agreed = diloco_by_hand(made, 8, 3, outer=outer)
    for number, expected in enumerate(params):
        assert_close(group(state.params, number), expected)
    assert_close(jax.device_get(state.sync["agreed"]), agreed)
    assert max(leaf_errors(group(state.params, 0), group(state.params, 1)).values()) > 1e-4, "alone, groups differ"


# ---- in few bytes


def test_a_kernel_runs_in_a_group_of_one_device():
    tanh = sk.manual(jnp.tanh, [("batch", None)], ("batch", None), kernel=True)

    def loss_fn(params, batch, key):
        error = tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"] - batch["y"]
        return sk.mean((error**2).sum(-1), weights=batch["weight"])

    settings = {"sync": {"diloco": {"every": 3}}, "batch_size": 16, "steps": 40}
    with_kernel = program_of(task(adam(), num=64, loss_fn=loss_fn), **settings, **MESHES["data 4"])
    assert_close(train(with_kernel, 4)[0].params, train(on_data(), 4)[0].params)


def agreement(made):
    return next(phase.compiled for phase in made.phases if not phase.in_place)


@pytest.mark.parametrize("mesh", slow_except({"replica 2 x data 2"}, MESHES))
def test_int8_outer_gradients_leave_groups_equal(mesh):
    made = diloco(mesh, reducer="int8")
    axes = set(made.groups.axes)
    assert not [c for c in collectives(made.compiled.as_text(), made.sizes) if c.axes & axes], "alone nothing is sent"
    sent = [c for c in collectives(agreement(made).as_text(), made.sizes) if c.axes & axes]
    assert {c.kind for c in sent} == {"all-to-all", "all-gather"}
    assert all("u8" in c.line or "s8" in c.line for c in sent), sent
    state, _ = train(made, 3)
    for path, x in named_leaves(jax.device_get(state.params)):
        assert len({copy.tobytes() for copy in np.asarray(x)}) == 1, path
    begin, exact = group(made.init().params, 0), train(diloco(mesh), 3)[0]
    moves = [jax.tree.map(lambda x, y: x - y, group(s.params, 0), begin) for s in (state, exact)]
    assert 1e-4 < max(leaf_errors(*moves).values()) < 0.03


@pytest.mark.slow
def test_exact_reducer_equals_the_exact_mean():
    state, _ = train(diloco(reducer={"int8": {"block": 1}}), 3)
    assert_close(jax.device_get(state.params), jax.device_get(train(on_data(), 3)[0].params), 1e-6)


def test_plan_shows_500_times_less_communication():
    """Douillard et al. (2023), abstract: 500 inner steps, "communicating 500 times less"."""
    values = 128 * 128 + 128 * 8 + 8
    options = {"every": 500}
    plain, outer, small = (
        plan_program(program(sync), target_of(jax.devices()[:4]))
        for sync in ("every_step", {"diloco": options}, {"diloco": options | {"reducer": "int8"}})
    )
    assert plain["collective_bytes"] - 100 <= 2 * 3 / 4 * 4 * values == outer["wire"]["at_most"]
    assert outer["collective_bytes"] == 0 and 500 <= plain["collective_bytes"] / outer["wire"]["on_average"] < 500.5
    assert small["wire"]["at_most"] == int8().wire(values, 4) == 500 * small["wire"]["on_average"]


# ---- after synchronous training


def test_start_is_synchronous_then_diloco_continues(tmp_path):
    made = diloco(start=4)
    state, expected = train(made, 4)[0], jax.device_get(train(program("every_step"), 4)[0].params)
    for number in range(made.groups.num):
        assert_close(group(state.params, number), expected, 1e-6)
    assert bits(state.sync["agreed"]) == bits(group(state.params, 0))
    assert all(np.all(x == 0) for x in jax.tree.leaves(jax.device_get(state.sync["outer"])))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, state, {})
    checkpoints.close()
    begun, _, lines = restored(Checkpoints(tmp_path), 4, on_data())
    assert lines == [] and bits(train(made, 5, state, 5)[0]) == bits(train(on_data(), 5, begun, 5)[0])


def test_fragments_agree_in_the_rounds_after_its_start():
    made = diloco(every=4, fragments=2, overlap=1, start=6)
    phases = [(phase.name, phase.first, phase.until) for phase in made.phases]
    sends = [("send 1 of 2", 9, None), ("send 2 of 2", 11, None)]
    assert phases == [("start", 1, 6), *sends, ("apply 1 of 2", 9, None), ("apply 2 of 2", 11, None)]
    assert "to step 6 all replicas are synchronous in every step, 2 fragments at different steps" in made.explain()


# ---- going on


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints after step 4, in the middle of a round, and after step 6, at the end of one, with their states."""
    checkpoints, state, states = Checkpoints(tmp_path_factory.mktemp("diloco")), None, {}
    for start, steps in ((1, 4), (5, 2)):
        state, _ = train(on_data(), steps, state, start)
        checkpoints.save(start + steps - 1, state, {})
        checkpoints.wait()
        states[start + steps - 1] = jax.device_get(state)
    yield checkpoints, states
    checkpoints.close()


def test_a_run_goes_on_bit_for_bit(saved):
    checkpoints, states = saved
    state, _, lines = restored(checkpoints, 4, on_data())
    assert lines == [] and bits(train(on_data(), 2, state, 5)[0]) == bits(states[6])


def test_other_groups_start_from_mean_and_outer_state(saved):
    checkpoints, at_4 = saved[0], saved[1][4]
    other = diloco({"replica": 2, "data": 2, "tensor": 2})
    state, _, lines = restored(checkpoints, 4, other)
    assert len(lines) == 1 and "all continue from their mean" in lines[0]
    for number in range(other.groups.num):
        assert_close(group(state.params, number), mean_of_groups(at_4.params), 1e-6)
    assert bits(state.sync) == bits(at_4.sync) and np.abs(jax.tree.leaves(at_4.sync["outer"])[0]).max() > 0
    train(other, 2, state, 5)


def test_switches_between_syncs_keep_parameters(saved, tmp_path):
    checkpoints, at_6 = saved[0], saved[1][6]
    for folder, sync in (("plain", "every_step"), ("local", {"local_sgd": {"every": 3}})):
        other = program(sync)
        state, _, lines = restored(checkpoints, 6, other)
        assert_parts(" ".join(lines), "the sync state of step 6 is dropped")
        found = group(state.params, 1) if other.groups else jax.device_get(state.params)
        assert_close(found, mean_of_groups(at_6.params), 1e-6)
        state, _ = train(other, 2, state, 7)
        later = Checkpoints(tmp_path / folder)
        later.save(8, state, {})
        later.wait()
        before = jax.device_get(state.params)
        state, _, lines = restored(later, 8, on_data())
        later.close()
        begun = mean_of_groups(before) if other.groups else before
        assert_parts(
            " ".join(lines), "this one's is initialized" if other.groups else "each begins with the same parameters"
        )
        assert_close(jax.device_get(state.sync["agreed"]), begun, 1e-6)
        assert all(np.all(x == 0) for x in jax.tree.leaves(jax.device_get(state.sync["outer"])))
        assert bits(state.params) == bits(before) or not other.groups


# ---- refused


@pytest.mark.parametrize(
    "options, said",
    [
        ({"every": 0}, r"diloco\.every is 0"),
        ({"every": True}, r"diloco\.every is True"),
        ({"optimizer": {"name": "sdg"}}, r"diloco\.optimizer.*Did you mean 'sgd'"),
        ({"optimizer": {"name": "sgd"}}, r"diloco\.optimizer.*needs a learning rate"),
        ({"start": -1}, r"diloco\.start is -1"),
        ({"reducer": "int9"}, r"diloco\.reducer.*Did you mean 'int8'"),
        ({"reducer": {"int8": {"blocks": 3}}}, r"diloco\.reducer.*no option 'blocks'"),
    ],
)
def test_what_is_wrong_with_its_options_is_said(options, said):
    with pytest.raises(ConfigError, match=said):
        sk.Config(task="t.py:t", sync={"diloco": {"every": 3} | options})


@pytest.mark.parametrize("reducer", [{"bfloat16": {"error_feedback": True}}, {"ordered": {"warmup": 2}}])
def test_a_reducer_with_a_memory_is_refused(reducer):
    name = next(iter(reducer))
    with raises("sync: diloco", name, "without a state", "reducer: int8"):
        diloco(reducer=reducer)
