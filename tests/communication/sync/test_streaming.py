"""`sync: {diloco: {fragments, overlap}}`: fragments agree in turn, and what they send crosses beside a step, as in a
loop written by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.communication.sync.diloco import fragments_of
from spmdkit.errors import ConfigError
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.target import target_of
from spmdkit.program.restore import restored
from tests.communication.sync.test_diloco import adam, bits, group, program, train
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close
from tests.support.messages import refused

SIZES = {"bias": 8, "down": 128 * 8, "up": 128 * 128}
STREAMS = {
    "two in turn": {"every": 4, "fragments": 2},
    "three, beside a step": {"every": 3, "fragments": 3, "overlap": 1},
    "two, two steps late, mixed": {"every": 4, "fragments": 2, "overlap": 2, "alpha": 0.25},
    "one, beside a step": {"every": 2, "overlap": 1, "alpha": 0.0},
}


@functools.cache
def streaming(name, mesh="data 4"):
    return program(STREAMS[name], mesh)


def by_hand(made, steps, every, fragments=1, overlap=0, alpha=None):
    """Returns the parameters of each group: plain JAX on one device, a list of leaves."""
    inner, outer = adam(), optax.sgd(0.7, momentum=0.9, nesterov=True)
    mix = (0.5 if overlap else 0.0) if alpha is None else alpha

    @jax.jit
    def one(params, state, batch):
        def loss(params):
            error = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"] - batch["y"]
            return ((error**2).sum(-1) * batch["weight"]).sum() / batch["weight"].sum()

        updates, state = inner.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    agreed = group(made.init().params, 0)
    num = made.groups.num
    owner = dict(zip(SIZES, fragments_of(list(SIZES.values()), fragments), strict=True))
    outer_states = {name: outer.init(x) for name, x in agreed.items()}
    params, states, taken = [dict(agreed) for _ in range(num)], [inner.init(agreed)] * num, {}
    for step, batch in made.batches(1, steps):
        rows = jax.tree.map(np.asarray, batch.examples)
        for g in range(num):
            own = jax.tree.map(lambda x, g=g: x[g * len(x) // num : (g + 1) * len(x) // num], rows)
            params[g], states[g] = one(params[g], states[g], own)
        for name, fragment in owner.items():
            since = step - (every + fragment * every // fragments)
            if since >= 0 and since % every == 0:
                taken[name] = agreed[name] - sum(p[name] for p in params) / num
            if since - overlap >= 0 and (since - overlap) % every == 0:
                update, outer_states[name] = outer.update(taken[name], outer_states[name], agreed[name])
                agreed[name] = agreed[name] + update
                for p in params:
                    p[name] = mix * p[name] + (1 - mix) * agreed[name]
    return params, agreed


@pytest.mark.forms(3)
@pytest.mark.parametrize(
    "name, mesh",
    [*((name, "data 4") for name in STREAMS), ("two, two steps late, mixed", "replica 2 x fsdp 2 x tensor 2")],
)
def test_it_is_a_loop_written_by_hand(name, mesh):
    made = streaming(name, mesh)
    state = train(made, 13)
    params, agreed = by_hand(made, 13, **STREAMS[name])
    for number, expected in enumerate(params):
        assert_close(group(state.params, number), expected)
    assert_close(jax.device_get(state.sync["agreed"]), agreed)


def test_fragment_is_sent_and_applied_overlap_steps_later():
    """Every 4, overlap 2: `up` is taken after steps 4 and 8, the others after 6 and 10."""
    made = streaming("two, two steps late, mixed")
    sends, applies = {"send 1 of 2": [5, 9], "send 2 of 2": [7, 11]}, {"apply 1 of 2": [6, 10], "apply 2 of 2": [8, 12]}
    assert {p.name: [step for step in range(1, 13) if p.runs(step)] for p in made.phases} == sends | applies
    state = made.init()
    before, changed = jax.device_get(state), {kept: {name: [] for name in SIZES} for kept in ("taken", "agreed")}
    for step, batch in made.batches(1, 12):
        state, _ = made.step(state, batch)
        now = jax.device_get(state)
        for kept, name in itertools.product(changed, SIZES):
            if bits(now.sync[kept][name]) != bits(before.sync[kept][name]):
                changed[kept][name].append(step)
        for name in (name for name in SIZES if changed["taken"][name][-1:] == [step]):
            expected = before.sync["agreed"][name] - before.params[name].mean(0)
            np.testing.assert_allclose(now.sync["taken"][name], expected, atol=1e-6)
        before = now
    assert changed["taken"] == {"up": [5, 9], "down": [7, 11], "bias": [7, 11]}
    assert changed["agreed"] == {"up": [6, 10], "down": [8, 12], "bias": [8, 12]}


@pytest.mark.parametrize(
    "name, mesh",
    [("three, beside a step", "data 4"), ("two, two steps late, mixed", "replica 2 x fsdp 2 x tensor 2")],
)
def test_each_agreement_sends_only_its_fragment(name, mesh):
    made = streaming(name, mesh)
    axes = set(made.groups.axes)
    crossing = lambda compiled: [c for c in collectives(compiled.as_text(), made.sizes) if c.axes & axes]
    assert not crossing(made.compiled), "alone nothing is sent"
    sends = [phase for phase in made.phases if phase.name.startswith("send")]
    applies = [phase for phase in made.phases if phase.name.startswith("apply")]
    fragments = STREAMS[name]["fragments"]
    assert len(sends) == len(applies) == fragments and all(phase.in_place for phase in sends)
    assert not any(crossing(phase.compiled) for phase in applies)
    assert all({c.kind for c in crossing(phase.compiled)} == {"all-reduce"} for phase in sends)


def test_plan_bounds_a_step_by_the_largest_fragment():
    made = streaming("three, beside a step")
    wire = plan_program(made, target_of(jax.devices()[:4]))["wire"]
    formula = lambda values: 2 * 3 / 4 * 4 * values
    assert wire["at_most"] == formula(SIZES["up"])
    assert wire["on_average"] == pytest.approx(formula(sum(SIZES.values())) / 3)


def test_fragments_are_of_about_the_same_bytes():
    sizes = [50, 10, 10, 10, 10, 10, 100]
    owner = fragments_of(sizes, 2)
    filled = [sum(size for size, fragment in zip(sizes, owner, strict=True) if fragment == i) for i in (0, 1)]
    assert filled == [100, 100]
    assert sorted(fragments_of([0, 0, 0], 3)) == [0, 1, 2], "every fragment has a leaf"


@pytest.mark.parametrize("at", [4, 5, 6])
def test_resume_is_bitwise_at_any_step(at, tmp_path):
    """Fragments send after steps 4, 6, 8, 10 and are applied two steps later: before, between and after."""
    made = streaming("two, two steps late, mixed")
    state = train(made, at)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at, state, {})
    checkpoints.wait()
    expected = bits(train(made, 5, state, at + 1))
    state, _, lines = restored(checkpoints, at, made)
    checkpoints.close()
    assert lines == [] and bits(train(made, 5, state, at + 1)) == expected


def test_it_is_explained():
    assert "3 fragments at different steps" in streaming("three, beside a step").explain()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"fragments": 0}, r"diloco\.fragments is 0"),
        ({"fragments": 4}, r"diloco\.fragments is 4, with every: 3"),
        ({"fragments": True}, r"diloco\.fragments is True"),
        ({"overlap": 3}, r"diloco\.overlap is 3, with every: 3"),
        ({"overlap": -1}, r"diloco\.overlap is -1"),
        ({"alpha": 1.0}, r"diloco\.alpha is 1\.0"),
        ({"alpha": "half"}, r"diloco\.alpha is 'half'"),
    ],
)
def test_what_is_wrong_with_its_options_is_said(options, said):
    with pytest.raises(ConfigError, match=said):
        sk.Config(task="t.py:t", sync={"diloco": {"every": 3} | options})


def test_too_many_fragments_and_warmup_overlap_are_rejected():
    with refused("diloco.fragments is 5", "3 arrays", repair="fragments: 3"):
        program({"every": 8, "fragments": 5})
    with refused("sync: diloco", "warmup", repair="warmup: 0"):
        reducer = {"bfloat16": {"error_feedback": False, "warmup": 3}}
        program({"every": 8, "overlap": 1}, "replica 2 x data 2", reducer=reducer)
