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
from tests.support.messages import refused, says
from tests.support.reducer_runs import task

MESHES = {
    "data 4": {"mesh": {"data": 4}},
    "replica 2 x data 2": {"mesh": {"replica": 2, "data": 2}},
    "replica 2 x fsdp 2 x tensor 2": {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}},
}
OUTER = {"name": "sgd", "learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def adam():
    return optax.adam(1e-2, eps=1e-3)


def program(options=None, mesh="data 4", sync=None, **settings):
    settings = {"batch_size": 16, "steps": 40} | settings | (MESHES[mesh] if isinstance(mesh, str) else {"mesh": mesh})
    return program_of(task(adam(), num=64), sync=sync or {"diloco": {"every": 3} | (options or {})}, **settings)


@functools.cache
def on_data():
    return program()


def train(made, steps, state=None, start=1):
    state = made.init() if state is None else state
    for _, batch in made.batches(start, start + steps - 1):
        state, _ = made.step(state, batch)
    return state


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


def group(tree, number):
    return jax.tree.map(lambda x: np.asarray(x)[number], jax.device_get(tree))


def by_hand(made, steps, outer, every=3):
    """Returns (parameters of each group, the outer parameters): plain JAX on one device."""
    inner = adam()

    @jax.jit
    def one(params, state, batch):
        def loss(params):
            error = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"] - batch["y"]
            return ((error**2).sum(-1) * batch["weight"]).sum() / batch["weight"].sum()

        updates, state = inner.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    anchor = group(made.init().params, 0)
    num, outer_state = made.groups.num, outer.init(anchor)
    params, states = [anchor] * num, [inner.init(anchor)] * num
    for step, batch in made.batches(1, steps):
        rows = jax.tree.map(np.asarray, batch.examples)
        for g in range(num):
            own = jax.tree.map(lambda x, g=g: x[g * len(x) // num : (g + 1) * len(x) // num], rows)
            params[g], states[g] = one(params[g], states[g], own)
        if step % every == 0:
            gradient = jax.tree.map(lambda a, *all_of: a - sum(all_of) / num, anchor, *params)
            updates, outer_state = outer.update(gradient, outer_state, anchor)
            anchor = optax.apply_updates(anchor, updates)
            params = [anchor] * num
    return params, anchor


@pytest.mark.forms(2)
@pytest.mark.parametrize(
    "mesh, optimizer",
    [*((mesh, OUTER) for mesh in MESHES), ("data 4", {"name": "adam", "learning_rate": 3e-3, "eps": 1e-3})],
)
def test_it_is_a_loop_written_by_hand(mesh, optimizer):
    made = program({"optimizer": optimizer} if optimizer is not OUTER else {}, mesh)
    state = train(made, 8)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if optimizer is OUTER else optax.adam(3e-3, eps=1e-3)
    params, agreed = by_hand(made, 8, outer)
    for number, expected in enumerate(params):
        assert_close(group(state.params, number), expected)
    assert_close(jax.device_get(state.sync["agreed"]), agreed)
    assert max(leaf_errors(group(state.params, 0), group(state.params, 1)).values()) > 1e-4, "alone, groups differ"


# ---- in few bytes


def agreement(made):
    return next(phase.compiled for phase in made.phases if not phase.in_place)


@pytest.mark.parametrize("mesh", MESHES)
def test_int8_outer_gradients_leave_groups_equal(mesh):
    made = program({"reducer": "int8"}, mesh)
    axes = set(made.groups.axes)
    assert not [c for c in collectives(made.compiled.as_text(), made.sizes) if c.axes & axes], "alone nothing is sent"
    sent = [c for c in collectives(agreement(made).as_text(), made.sizes) if c.axes & axes]
    assert {c.kind for c in sent} == {"all-to-all", "all-gather"}
    assert all("u8" in c.line or "s8" in c.line for c in sent), sent
    state = train(made, 3)
    for path, x in named_leaves(jax.device_get(state.params)):
        assert len({copy.tobytes() for copy in np.asarray(x)}) == 1, path
    begin = group(made.init().params, 0)
    exact, found = (
        jax.tree.map(lambda x, y: x - y, group(s.params, 0), begin) for s in (train(program({}, mesh), 3), state)
    )
    errors = leaf_errors(found, exact)
    assert 1e-4 < max(errors.values()) < 0.03, errors


def test_exact_reducer_equals_the_exact_mean():
    state = train(program({"reducer": {"int8": {"block": 1}}}), 6)
    assert_close(jax.device_get(state.params), jax.device_get(train(on_data(), 6).params), 1e-6)


def sent(sync):
    """Returns `wire` of the plan of eight replicas."""
    made = program(sync=sync, mesh={"data": 8})
    return plan_program(made, target_of(jax.devices()[:8]))


def test_plan_shows_500_times_less_communication():
    """Douillard et al. (2023), abstract: eight workers, 500 inner steps, "communicating 500 times less"."""
    values = 128 * 128 + 128 * 8 + 8
    plain, outer = sent("every_step"), sent({"diloco": {"every": 500}})
    assert plain["collective_bytes"] - 100 <= 2 * 7 / 8 * 4 * values == outer["wire"]["at_most"]
    assert outer["collective_bytes"] == 0 and 500 <= plain["collective_bytes"] / outer["wire"]["on_average"] < 500.5
    small = sent({"diloco": {"every": 500, "reducer": "int8"}})["wire"]
    assert small["at_most"] == int8().wire(values, 8) == 500 * small["on_average"]


# ---- after synchronous training
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["data 4", "replica 2 x fsdp 2 x tensor 2"])
def test_start_is_synchronous_then_diloco_continues(mesh, tmp_path):
    made, plain = program({"start": 4}, mesh), program(mesh=mesh, sync="every_step")
    state, expected = train(made, 4), jax.device_get(train(plain, 4).params)
    for number in range(made.groups.num):
        assert_close(group(state.params, number), expected, 1e-6)
    assert bits(state.sync["agreed"]) == bits(group(state.params, 0))
    assert all(np.all(x == 0) for x in outer_of(state))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, state, {})
    checkpoints.close()
    whole = program(mesh=mesh)
    begun, _, lines = restored(Checkpoints(tmp_path), 4, whole)
    assert lines == [] and bits(train(made, 5, state, 5)) == bits(train(whole, 5, begun, 5))


def outer_of(state):
    return jax.tree.leaves(jax.device_get(state.sync["outer"]))


def test_fragments_agree_in_the_rounds_after_its_start():
    made = program({"every": 4, "fragments": 2, "overlap": 1, "start": 6})
    phases = [(phase.name, phase.first, phase.until) for phase in made.phases]
    sends = [("send 1 of 2", 9, None), ("send 2 of 2", 11, None)]
    assert phases == [("start", 1, 6), *sends, ("apply 1 of 2", 9, None), ("apply 2 of 2", 11, None)]
    assert "to step 6 all replicas are synchronous in every step, 2 fragments at different steps" in made.explain()


# ---- going on


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints after step 4, in the middle of a round, and after step 6, at the end of one, with the parameters
    after step 9."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("diloco"))
    states, state = {}, None
    for start, step in ((1, 4), (5, 6)):
        state = train(on_data(), step - start + 1, state, start)
        checkpoints.save(step, state, {})
        checkpoints.wait()
        states[step] = jax.device_get(state)
    yield checkpoints, states, bits(train(on_data(), 3, state, 7))
    checkpoints.close()


@pytest.mark.parametrize("at", [4, 6])
def test_a_run_goes_on_bit_for_bit(at, saved):
    checkpoints, _, expected = saved
    state, _, lines = restored(checkpoints, at, on_data())
    assert lines == [] and bits(train(on_data(), 9 - at, state, at + 1)) == expected


@pytest.mark.parametrize("at", [4, 6])
@pytest.mark.parametrize("mesh", [{"data": 2}, {"replica": 2, "data": 2, "tensor": 2}])
def test_other_groups_start_from_mean_and_outer_state(mesh, at, saved):
    checkpoints, states, _ = saved
    other = program(mesh=mesh)
    state, _, lines = restored(checkpoints, at, other)
    assert len(lines) == 1 and "all continue from their mean" in lines[0]
    mean = jax.tree.map(lambda x: x.mean(0), states[at].params)
    for number in range(other.groups.num):
        assert_close(group(state.params, number), mean, 1e-6)
    assert bits(state.sync) == bits(states[at].sync) and np.abs(jax.tree.leaves(states[at].sync["outer"])[0]).max() > 0
    train(other, 3, state, at + 1)


def test_switches_between_syncs_keep_parameters(saved, tmp_path):
    checkpoints, states, _ = saved
    for folder, sync in (("plain", "every_step"), ("local", {"local_sgd": {"every": 3}})):
        other = program(sync=sync)
        state, _, lines = restored(checkpoints, 6, other)
        says(" ".join(lines), "the sync state of step 6 is dropped")
        mean = jax.tree.map(lambda x: x.mean(0), states[6].params)
        assert_close(group(state.params, 1) if other.groups else jax.device_get(state.params), mean, 1e-6)
        state = train(other, 2, state, 7)
        later = Checkpoints(tmp_path / folder)
        later.save(8, state, {})
        later.wait()
        before = jax.device_get(state.params)
        state, _, lines = restored(later, 8, on_data())
        later.close()
        begun = jax.tree.map(lambda x: x.mean(0), before) if other.groups else before
        says(" ".join(lines), "this one's is initialized" if other.groups else "each begins with the same parameters")
        assert_close(jax.device_get(state.sync["agreed"]), begun, 1e-6)
        assert all(np.all(x == 0) for x in jax.tree.leaves(jax.device_get(state.sync["outer"])))
        assert bits(state.params) == bits(before) or not other.groups
        train(on_data(), 2, state, 9)


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
    with refused("sync: diloco", name, "without a state", "reducer: int8"):
        program({"reducer": reducer})
