"""A user's own sync, named by a config: it trains as one of the package, it may keep something, and only what is
declared is called."""

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.program import source_digest
from spmdkit.program.restore import restored
from tests.support.own_files import config_by_choice
from tests.support.reducer_runs import bits
from tests.support.sync_runs import train

TASK = """
import optax
from tests.support.reducer_runs import task as made

task = made(optax.adam(1e-2, eps=1e-3), num=64)
"""

MINE = """
import pathlib
import jax
import spmdkit as sk

with open(pathlib.Path(__file__).parent / "imported", "a") as file:
    file.write("1")

mean_of = lambda params, kept, mean: mean(params)

@sk.sync
def plain(every):
    return sk.Sync(every=every, agree=lambda params, kept, mean: (mean(params), kept), view=mean_of)

@sk.sync
def slow(every, rate=0.5):
    def agree(params, kept, mean):
        new = jax.tree.map(lambda s, m: s + rate * (m - s), kept["slow"], mean(params))
        return new, {"slow": new}
    return sk.Sync(every=every, init=lambda params: {"slow": params}, agree=agree, view=mean_of)

made = plain(2)

def undeclared():
    raise SystemExit("was called")

@sk.sync
def number():
    return 3

@sk.sync
def without_view(every):
    return sk.Sync(every=every, agree=lambda params, kept, mean: (mean(params), kept))

@sk.sync
def of_all(every):
    return sk.Sync(every=every, agree=lambda params, kept, mean: (params, kept), view=mean_of)

@sk.sync
def forgets(every):
    agree = lambda params, kept, mean: (mean(params), None)
    return sk.Sync(every=every, init=lambda params: {"slow": params}, agree=agree, view=mean_of)

@sk.sync
def alone(every):
    return sk.Sync(every=every, agree=lambda params, kept, mean: mean(params)["up"], view=mean_of)

@sk.sync
def raises(every):
    def agree(params, kept, mean):
        raise KeyError("velocity")
    return sk.Sync(every=every, agree=agree, view=mean_of)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Returns a function from the value of `sync` to the config of a file beside the sync's."""
    lines = "task: own.py:task\nbatch_size: 16\nsteps: 20\nmesh: {data: 4}\n"
    return config_by_choice(tmp_path, monkeypatch, {"own.py": TASK, "mine.py": MINE}, lines, "sync")


def program(config):
    return sk.build(config, devices=jax.devices()[:4])


def test_user_mean_sync_equals_local_sgd_bitwise(config):
    expected = bits(train(program(config("{local_sgd: {every: 2}}")), 5)[0])
    for choice in ("{mine.py:plain: {every: 2}}", "mine.py:made"):
        assert bits(train(program(config(choice)), 5)[0]) == expected
    assert bits(train(program(config("{mine.py:plain: {every: 3}}")), 5)[0]) != expected


def test_user_sync_state_is_saved_and_resumes_bitwise(config, tmp_path):
    asked = config("{mine.py:slow: {every: 2, rate: 0.25}}")
    made = program(asked)
    state, _ = train(made, 3)
    kept = jax.device_get(state.sync)["slow"]
    assert kept.keys() == state.params.keys() and kept["up"].shape == state.params["up"].shape[1:]
    begin = jax.device_get(made.init().sync)["slow"]
    assert not np.array_equal(kept["up"], begin["up"])
    checkpoints = Checkpoints(tmp_path / "saved")
    checkpoints.save(3, state, {})
    checkpoints.wait()
    expected = bits(train(made, 3, state, 4)[0])
    state, _, lines = restored(checkpoints, 3, made)
    checkpoints.close()
    assert bits(train(made, 3, state, 4)[0]) == expected and lines == []


def test_config_check_does_not_import_the_sync(config, tmp_path):
    asked = config("{mine.py:slow: {every: 2}}")
    assert not (tmp_path / "imported").exists()
    assert (
        "mine.py:slow: 4 groups along data train separately, and are averaged after every 2 steps"
        in program(asked).explain()
    )
    assert (tmp_path / "imported").read_text() == "1"


def test_sync_text_is_part_of_source_digest(config, tmp_path):
    asked = config("{mine.py:slow: {every: 2}}")
    before = source_digest.digests(asked)
    (tmp_path / "mine.py").write_text(MINE.replace("s + rate *", "s + 2 * rate *"))
    assert source_digest.digests(asked) != before != source_digest.digests(config("every_step"))


WRONG = {
    "os:system": r"sync: os:system is a function of .*\. A config names objects that its module registers: .* "
    r"Write one, in a file of yours",
    "mine.py:undeclared": r"sync: mine\.py:undeclared is a function of mine\. .* Write @sk\.sync above its definition",
    "mine.py:slwo": r"sync: mine\.py has no 'slwo'\. Did you mean 'slow'",
    "nowhere.py:made": r"sync: file .*nowhere\.py does not exist\. Paths are relative to the config's folder",
    "mine.py:number": r"sync: mine\.py:number\(\.\.\.\) returned int\. It must return an spmdkit\.Sync\. Write return "
    r"sk\.Sync",
    "{mine.py:slow: {evry: 2}}": r"do not fit mine\.py:slow\(every, rate=0\.5\).* Did you mean 'every'",
    "{mine.py:made: {every: 3}}": r"sync: mine\.py:made is a sync, and the options \['every'\] have no effect\. "
    r".*under "
    r"@sk\.sync",
    "{mine.py:plain: {every: 0}}": r"ValueError at .*mine\.py.*every is 0: it is the number of steps between two "
    r"synchronizations",
    "{mine.py:without_view: {every: 2}}": r"a sync of groups \(every: 2\) needs agree and view",
    "{mine.py:of_all: {every: 2}}": r"sync mine\.py:of_all: agree: the parameters: 'bias' was float32\[8\] "
    r"and becomes float32\[4,8\]\. .*one copy",
    "{mine.py:forgets: {every: 2}}": r"sync mine\.py:forgets: agree: the sync state: 'slow/bias' was "
    r"float32\[8\] and becomes absent",
    "{mine.py:alone: {every: 2}}": r"sync mine\.py:alone: agree returned ShapeDtypeStruct\. agree returns "
    r"\(one copy .* Write return new, state",
    "{mine.py:raises: {every: 2}}": r"sync mine\.py:raises: agree raised KeyError at .*mine\.py:\d+: 'velocity'",
    "mine.py": r"config\.yaml:5: sync.*needs one of diloco, every_step, local_sgd",
    "{mine.py:plain: 3}": r"config\.yaml:5: sync.*options are a mapping, found 3\. Write \{mine\.py:plain: \{OPTION: "
    r"VALUE\}\}",
}


@pytest.mark.parametrize("choice", WRONG)
def test_what_is_wrong_with_a_sync_is_said(choice, config):
    with pytest.raises((ConfigError, UserCodeError), match=WRONG[choice]):
        program(config(choice))
