"""`sync: {diloco: {fragments, overlap}}`: fragments agree in turn, and what they send crosses beside a step, as in a
loop written by hand."""

import functools
import itertools

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.communication.sync.diloco import fragments_of
from spmdkit.errors import ConfigError
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.target import target_of
from spmdkit.program.restore import restored
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.messages import raises
from tests.support.reducer_runs import bits
from tests.support.sync_runs import SIZES, diloco_by_hand, group, program, train

STREAMS = {
    "two in turn": {"every": 4, "fragments": 2},
    "three, beside a step": {"every": 3, "fragments": 3, "overlap": 1},
    "two, two steps late, mixed": {"every": 4, "fragments": 2, "overlap": 2, "alpha": 0.25},
    "one, beside a step": {"every": 2, "overlap": 1, "alpha": 0.0},
}


@functools.cache
def streaming(name, mesh="data 4"):
    return program({"diloco": STREAMS[name]}, mesh)


@pytest.mark.parametrize(
    "name, mesh",
    slow_except(
        [("two, two steps late, mixed", "data 4")],
        [*((name, "data 4") for name in STREAMS), ("two, two steps late, mixed", "replica 2 x fsdp 2 x tensor 2")],
    ),
)
def test_it_is_a_loop_written_by_hand(name, mesh):
    made = streaming(name, mesh)
    state, _ = train(made, 11)
    params, agreed = diloco_by_hand(made, 11, **STREAMS[name])
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


def test_each_agreement_sends_only_its_fragment(name="three, beside a step"):
    made = streaming(name)
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


def test_resume_is_bitwise_between_send_and_application(tmp_path, at=5):
    made = streaming("two, two steps late, mixed")
    state, _ = train(made, at)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at, state, {})
    checkpoints.wait()
    expected = bits(train(made, 4, state, at + 1)[0])
    state, _, lines = restored(checkpoints, at, made)
    checkpoints.close()
    assert lines == [] and bits(train(made, 4, state, at + 1)[0]) == expected


def test_it_is_explained():
    assert "3 fragments at different steps" in streaming("three, beside a step").explain()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"fragments": 0}, r"diloco\.fragments is 0"),
        ({"fragments": 4}, r"diloco\.fragments is 4\. .*every: 3"),
        ({"fragments": True}, r"diloco\.fragments is True"),
        ({"overlap": 3}, r"diloco\.overlap is 3\. With every: 3"),
        ({"overlap": -1}, r"diloco\.overlap is -1"),
        ({"alpha": 1.0}, r"diloco\.alpha is 1\.0"),
        ({"alpha": "half"}, r"diloco\.alpha is 'half'"),
    ],
)
def test_what_is_wrong_with_its_options_is_said(options, said):
    with pytest.raises(ConfigError, match=said):
        sk.Config(task="t.py:t", sync={"diloco": {"every": 3} | options})


def test_too_many_fragments_and_warmup_overlap_are_rejected():
    with raises("diloco.fragments is 5", "3 arrays", repair="fragments: 3"):
        program({"diloco": {"every": 8, "fragments": 5}})
    with raises("sync: diloco", "warmup", repair="warmup: 0"):
        reducer = {"bfloat16": {"error_feedback": False, "warmup": 3}}
        program({"diloco": {"every": 8, "overlap": 1}}, "replica 2 x data 2", reducer=reducer)
