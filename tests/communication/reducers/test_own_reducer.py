"""A user's own reducer, named by a config: it trains, it may keep something, and only what is declared is called."""

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.foundation import plugins
from spmdkit.program import source_digest
from spmdkit.verify.cases import exact_reducer, reducer_note
from tests.support.core_runs import assert_close
from tests.support.messages import Parts, raises
from tests.support.own_files import config_by_choice
from tests.support.reducer_runs import residuals, train

TASK = """
import spmdkit as sk
from tests.support.reducer_runs import adding, task as made

task = made(adding())
"""

MINE = """
import pathlib
import jax
import jax.numpy as jnp
from jax import lax
import spmdkit as sk

with open(pathlib.Path(__file__).parent / "imported", "a") as file:
    file.write("1")

def wire(values, num):
    return 2 * (num - 1) / num * 4 * values

@sk.reducer
def scaled(scale=1.0):
    def apply(leaves, states, over):
        return [lax.psum(scale * x, over.axes) for x in leaves], states
    return sk.Reducer(exact=True, apply=apply, wire=wire)

@sk.reducer
def coarse(step=2**-10):
    def apply(leaves, states, over):
        asked = [x + state["error"] for x, state in zip(leaves, states)]
        sent = [jnp.round(x / step) * step for x in asked]
        return [lax.psum(x, over.axes) for x in sent], [{"error": x - y} for x, y in zip(asked, sent)]
    init = lambda leaf: {"error": jax.ShapeDtypeStruct(leaf.shape, jnp.float32)}
    return sk.Reducer(exact=False, apply=apply, wire=wire, init=init, input_scale="weighted")

made = scaled()

def undeclared():
    raise SystemExit("was called")

@sk.reducer
def number():
    return 3
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Returns a function from the value of `reducer` to the config of a file beside the reducer's."""
    lines = "task: own.py:task\nbatch_size: 64\nsteps: 20\nmesh: {data: 4}\ndata: {drop_remainder: false}\n"
    return config_by_choice(tmp_path, monkeypatch, {"own.py": TASK, "mine.py": MINE}, lines, "reducer")


def program(config):
    return sk.build(config, devices=jax.devices()[:4])


def test_user_reducer_equals_sum(config):
    expected, losses = train(program(config("sum")), 4)
    for choice in ("mine.py:made", "{mine.py:scaled: {scale: 1}}"):
        made = program(config(choice))
        state, found = train(made, 4)
        assert made.form == "manual"
        np.testing.assert_allclose(found, losses, rtol=1e-6)
        assert_close(state.opt_state, expected.opt_state)
    state, _ = train(program(config("{mine.py:scaled: {scale: 2}}")), 4)
    assert_close(jax.tree.map(lambda x: x / 2, state.opt_state), expected.opt_state)


def test_user_reducer_state_is_saved_and_complete(config):
    expected = jax.device_get(train(program(config("sum")), 6)[0].opt_state)
    state, _ = train(program(config("mine.py:coarse")), 6)
    applied, left = jax.device_get(state.opt_state), residuals(state)
    assert all(np.abs(x).max() > 1e-5 for x in jax.tree.leaves(left))
    assert_close(jax.tree.map(np.add, applied, left), expected)


def test_config_check_does_not_import_the_reducer(config, tmp_path):
    requested = config("mine.py:coarse")
    assert not (tmp_path / "imported").exists()
    assert exact_reducer(requested) == "sum"
    assert reducer_note(requested).startswith("reducer mine.py:coarse is not exact and declares no exact options")
    assert exact_reducer(config("mine.py:scaled")) == "mine.py:scaled"
    assert (tmp_path / "imported").read_text() == "1"


def test_reducer_text_is_part_of_source_digest(config, tmp_path):
    requested = config("mine.py:scaled")
    before = source_digest.digests(requested)
    (tmp_path / "mine.py").write_text(MINE.replace("scale * x", "scale * 2 * x"))
    assert source_digest.digests(requested) != before
    assert source_digest.digests(config("sum")) == source_digest.digests(config("ordered")) != before


DECLARED = "A config names objects that its module registers"
WRONG = {
    "os:system": Parts("reducer: os:system", "is a function of", DECLARED, "in a file of yours"),
    "mine.py:undeclared": Parts(
        "reducer: mine.py:undeclared", "a function of mine", DECLARED, "@sk.reducer above its definition"
    ),
    "mine.py:scale": Parts("reducer: mine.py", "no 'scale'", repair="'scaled'?"),
    "nowhere.py:made": Parts("reducer: file", "nowhere.py does not exist", "config's folder"),
    "mine.py:number": Parts("reducer: mine.py:number(...)", "returned int", "an spmdkit.Reducer", "return sk.Reducer"),
    "{mine.py:scaled: {scael: 2}}": Parts("mine.py:scaled(scale=1.0)", "do not fit", repair="'scale'?"),
    "{mine.py:made: {scale: 2}}": Parts(
        "reducer: mine.py:made", ("is a reducer", "['scale']"), "no effect", "Write one"
    ),
    "mine.py": Parts("config.yaml:6: reducer", rule=f"one of {', '.join(plugins.names('reducers'))}"),
    "'mine.py:3'": Parts("config.yaml:6: reducer", "'3'", "no name of Python", "reducer: mine.py:reducer"),
    "{mine.py:scaled: 3}": Parts("config.yaml:6: reducer", "found 3", "a mapping", "{mine.py:scaled: {OPTION: VALUE}}"),
}


@pytest.mark.parametrize("choice", WRONG)
def test_what_is_wrong_with_a_reducer_is_said(choice, config):
    with raises(*WRONG[choice]):
        program(config(choice))
