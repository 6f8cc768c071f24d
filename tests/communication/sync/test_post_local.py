"""`sync: post_local`: the steps to `start` are those of synchronous training for every optimizer, the later ones those
of local SGD."""

import functools

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.target import target_of
from spmdkit.program.restore import restored
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.reducer_runs import bits
from tests.support.sync_runs import MESHES as GROUP_MESHES
from tests.support.sync_runs import group, program, train

clipped = functools.partial(program, clip_norm=1.0, ema=0.9)
POST_LOCAL = {"post_local": {"start": 3, "every": 2}}
MESHES = [*GROUP_MESHES, {"replica": 2, "fsdp": 2}]


@functools.cache
def on_data():
    return clipped(POST_LOCAL)


@pytest.mark.parametrize("mesh", slow_except(["replica 2 x fsdp 2 x tensor 2"], MESHES), ids=str)
def test_start_is_synchronous_with_equal_copies(mesh):
    """With Adam and clipping, which local SGD with `every: 1` does not equal; no copy is moved between devices."""
    made, plain = clipped(POST_LOCAL, mesh), clipped("every_step", mesh)
    state, losses = train(made, 3)
    expected, theirs = train(plain, 3)
    np.testing.assert_allclose(losses, theirs, rtol=1e-6)
    for field in ("params", "opt_state", "ema"):
        for number in range(made.groups.num):
            assert_close(group(getattr(state, field), number), jax.device_get(getattr(expected, field)), 1e-6)
        for path, x in named_leaves(getattr(state, field)):
            copies = {np.asarray(x)[number].tobytes() for number in range(made.groups.num)}
            assert len(copies) == 1, path
    texts = next(phase.compiled for phase in made.phases if phase.name == "start").as_text(), plain.compiled.as_text()
    found = [sorted((c.kind, sorted(c.axes)) for c in collectives(text, made.sizes)) for text in texts]
    assert found[0] == found[1] and len(found[0]) > 2


def test_after_start_it_is_local_sgd(tmp_path):
    made = on_data()
    at_3, _ = train(made, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, at_3, {})
    checkpoints.close()
    state, losses = train(made, 4, at_3, 4)
    local = clipped({"local_sgd": {"every": 2}})
    begun, _, lines = restored(Checkpoints(tmp_path), 3, local)
    expected, theirs = train(local, 4, begun, 4)
    assert lines == [] and losses == theirs and bits(state) == bits(expected)
    alone, _ = train(made, 3, restored(Checkpoints(tmp_path), 3, made)[0], 4)  # after step 6 the mean
    assert bits(group(alone.params, 0)) == bits(group(alone.params, 1))
    alone, _ = train(made, 2, restored(Checkpoints(tmp_path), 3, made)[0], 4)  # in the middle of a round
    assert bits(group(alone.params, 0)) != bits(group(alone.params, 1))


def test_resume_is_bitwise_across_the_start(tmp_path, at=2):
    made = on_data()
    state, _ = train(made, at)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at, state, {})
    checkpoints.wait()
    expected = bits(train(made, 3, state, at + 1)[0])
    state, _, lines = restored(checkpoints, at, made)
    checkpoints.close()
    assert lines == [] and bits(train(made, 3, state, at + 1)[0]) == expected


def test_switches_from_synchronous_training_and_back(tmp_path):
    plain = clipped("every_step", {"data": 2})
    state, _ = train(plain, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, {})
    checkpoints.wait()
    expected = jax.device_get(train(plain, 1, state, 3)[0].params)
    state, _, lines = restored(checkpoints, 2, on_data())
    assert len(lines) == 1 and "each begins with the same parameters" in lines[0]
    state, _ = train(on_data(), 1, state, 3)
    assert_close(group(state.params, 3), expected, 1e-6)
    checkpoints.save(3, state, {})
    checkpoints.close()
    state, _, lines = restored(Checkpoints(tmp_path), 3, plain)
    assert len(lines) == 1 and "all continue from their mean" in lines[0]
    assert_close(jax.device_get(state.params), expected, 1e-6)


def test_a_plan_has_the_bytes_of_each_phase():
    rows = plan_program(on_data(), target_of(jax.devices()[:4]))["collectives"]
    sent = {}
    for row in rows:
        key = (row["phase"], row["every"], row.get("until"))
        sent[key] = sent.get(key, 0) + row["bytes"]
    values = 128 * 128 + 128 * 8 + 8
    formula = 2 * 3 / 4 * 4 * values
    assert set(sent) == {("start", 1, 3), ("agreement", 2, None)}, "alone nothing is sent"
    assert sent["agreement", 2, None] == formula and formula <= sent["start", 1, 3] <= formula + 200


def test_it_is_explained():
    assert "to step 3 all replicas are synchronous in every step" in on_data().explain()
    assert [(phase.name, phase.first, phase.until) for phase in on_data().phases] == [
        ("start", 1, 3),
        ("agreement", 4, None),
    ]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"start": -1}, "start"),
        ({"start": 1.5}, "start"),
        ({"start": True}, "start"),
        ({"start": 2, "every": 0}, "every"),
    ],
)
def test_its_numbers_are_whole(options, said):
    with pytest.raises(ConfigError, match=rf"post_local\.{said}"):
        sk.Config(task="t.py:t", sync={"post_local": options})
