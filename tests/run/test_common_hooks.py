"""The hooks of spmdkit/run/common_hooks: one line of a config each, and their state continues after a restart."""

import importlib
import inspect
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError, Preempted
from spmdkit.foundation import plugins
from spmdkit.program.learning_rate import UpdateScale
from spmdkit.run.hooks.base import Hook, Stop
from tests.support import small_runs

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
REQUIRED = {"samples": {"fn": "a.py:b"}, "stop_after": {"seconds": 5}}


def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2)


def rising(params, batch):
    return {"loss": sk.mean(jnp.abs(batch @ params["w"]))}  # grows from 0: never better than at first


def train(folder, *hooks, eval_fn=rising, **changes):
    optimizer = lambda rate: optax.sgd(rate)
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optimizer, X, X[:16], eval_fn=eval_fn)
    values = {"steps": 12, "batch_size": 16, "learning_rate": 0.01, "hooks": list(hooks)}
    values |= {"eval": {"every_steps": 1}, "log": {"every_steps": 1, "progress": "plain"}}
    return small_runs.train(folder, task, **{**values, **changes})


def rates(folder):
    """Returns the learning rate of each step, as a multiple of the config's."""
    records = small_runs.lines(folder, "metrics.jsonl")
    return {r["step"]: round(r["learning_rate"] / 0.01, 6) for r in records if "split" not in r}


@pytest.mark.parametrize("name", plugins.names("hooks"))
def test_each_common_hook_is_made_from_its_options(name):
    module = importlib.import_module(f"spmdkit.run.common_hooks.{name}")
    hook = module.make(**REQUIRED.get(name, {}))
    assert inspect.getdoc(module) and isinstance(hook, Hook) and hook.name == name
    assert plugins.problem("hooks", {name: REQUIRED[name]} if name in REQUIRED else name) is None
    if hook.state is not None:
        before = hook.state()
        hook.restore(json.loads(json.dumps(before)))
        assert hook.state() == before


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        ({"early_stopping": {"patience": 0}}, "patience is 0"),
        ({"early_stopping": {"mode": "least"}}, "mode is 'least'"),
        ({"early_stopping": {"patient": 3}}, "Did you mean 'patience'"),
        ({"reduce_on_plateau": {"factor": 2}}, "factor is 2"),
        ({"reduce_on_plateau": {"patience": 0}}, "patience is 0"),
        ({"reduce_on_plateau": {"split": "train", "metric": "accuracy"}}, "split: train follows the loss"),
        ({"reduce_on_plateau": {"split": "test"}}, "split is 'test'"),
        ({"stop_after": {"seconds": "1h"}}, "seconds is '1h'"),
        ("stop_after", "stop_after needs seconds"),
        ({"samples": {"fn": "write"}}, "fn is 'write'"),
        ("early_stoping", "Did you mean 'early_stopping'"),
    ],
)
def test_wrong_options_are_refused_by_the_config(hook, found):
    with pytest.raises(ConfigError, match=found):
        sk.Config(task="t.py:t", hooks=[hook])


@pytest.mark.parametrize("name", ["early_stopping", "reduce_on_plateau"])
def test_a_metric_that_is_not_evaluated_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"'acc' of the evaluation, but the evaluation has loss"):
        train(tmp_path, {name: {"metric": "acc"}})
    with pytest.raises(ConfigError, match=r"after the last step only\. Write eval:"):
        train(tmp_path, name, eval={})


def test_early_stopping_counts_over_a_restart(tmp_path):
    early = {"early_stopping": {"patience": 5}}
    train(tmp_path, early, steps=3)  # evaluations 1 to 3: best at step 1
    result = train(tmp_path, early)
    assert int(result.state.step) == 6 and result.run.finished.startswith("early_stopping: loss was best (")
    assert train(tmp_path, early).already_finished
    better = lambda params, batch: {"loss": loss_fn(params, batch, None)}
    assert int(train(tmp_path / "better", early, eval_fn=better).state.step) == 12
    worse = {"early_stopping": {"patience": 2, "mode": "max", "min_delta": 10}}
    assert int(train(tmp_path / "delta", worse).state.step) == 3


def test_plateau_of_evaluations_takes_effect_before_the_next_step(tmp_path):
    plateau = {"reduce_on_plateau": {"factor": 0.5, "patience": 2, "cooldown": 1, "min_scale": 0.25}}
    train(tmp_path, plateau)
    expected = {1: 1, 2: 1, 3: 1, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.25, 12: 0.25}
    assert {step: rates(tmp_path)[step] for step in expected} == expected
    for last in (5, 12):  # the second start is between two reductions
        train(tmp_path / "restarted", plateau, steps=last)
    assert rates(tmp_path / "restarted") == rates(tmp_path)
    losses = [[r["loss"] for r in small_runs.lines(f, "metrics.jsonl")] for f in (tmp_path, tmp_path / "restarted")]
    assert losses[0] == losses[1]


def test_a_rollback_sets_the_factor_again():
    """A checkpoint of the step between the evaluation and the next step has the old factor in its arrays."""
    hook = importlib.import_module("spmdkit.run.common_hooks.reduce_on_plateau").make(factor=0.5, patience=1)
    run = types.SimpleNamespace(message=lambda _: None)
    state = types.SimpleNamespace(opt_state=UpdateScale(jnp.float32(1)), replace=lambda opt_state: opt_state)
    for step in (1, 2):
        hook.after_eval(run, step, {"loss": 1.0})
    saved = hook.state()
    assert float(hook.before_step(run, 3, state).state.scale) == 0.5 and hook.before_step(run, 4, state) is None
    hook.restore(saved)
    assert float(hook.before_step(run, 3, state).state.scale) == 0.5


def test_the_factor_scales_the_update(tmp_path):
    plateau = {"reduce_on_plateau": {"factor": 0.5, "patience": 1}}
    states = []
    look = sk.Hook("look", after_step=lambda run, step, state, _: states.append(np.array(state.params["w"])))
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.sgd(0.01), X, X[:16], eval_fn=rising, hooks=[look])
    values = {"steps": 3, "batch_size": 64, "eval": {"every_steps": 1}, "hooks": [plateau]}
    small_runs.train(tmp_path, task, **values, data={"shuffle": False}, mesh={"fsdp": 2})
    w, found = jnp.zeros(3), []
    for factor in (1, 1, 0.5):  # the second evaluation is not better than the first
        w -= 0.01 * factor * jax.grad(lambda w: loss_fn({"w": w}, X, None).value)(w)
        found.append(w)
    np.testing.assert_allclose(states, found, rtol=1e-5)


def test_plateau_of_the_training_loss_is_that_of_optax(tmp_path):
    options = {"factor": 0.5, "patience": 1, "every": 2, "min_delta": 100.0}  # nothing is an improvement
    train(tmp_path, {"reduce_on_plateau": {"split": "train", **options}}, steps=8)
    assert rates(tmp_path)[1] == 1 and 0 < rates(tmp_path)[8] < 0.3


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def times(hook, *clocks):
    """Returns the action after each of these times since `begin`."""
    run = types.SimpleNamespace(clock=Clock())
    hook.begin(run, 0, None)
    actions = []
    for now in clocks:
        run.clock.now = now
        actions.append(hook.after_step(run, 1, None, None))
    return actions


def test_stop_after_counts_all_attempts_unless_it_restarts():
    make = importlib.import_module("spmdkit.run.common_hooks.stop_after").make
    first = make(100)
    assert times(first, 60, 99) == [None, None]
    second = make(100)
    second.restore(first.state())
    assert times(second, 0.5, 1) == [None, Stop(0, "stop_after: 1m40s have passed")]
    second.restore({"spent_s": 0.0})  # a rollback
    assert second.state() == {"spent_s": 100.0}
    third = make(100, restart=True)
    third.restore(first.state())
    assert times(third, 99, 100) == [None, Stop(42, "stop_after: 1m40s have passed")]


def test_stop_after_saves_and_ends_the_run(tmp_path):
    result = train(tmp_path, {"stop_after": {"seconds": 1e-6}})
    assert int(result.state.step) == 1 and train(tmp_path, {"stop_after": {"seconds": 1e-6}}).already_finished
    with pytest.raises(Preempted, match="stop_after"):
        train(tmp_path / "restart", {"stop_after": {"seconds": 1e-6, "restart": True}})


SAMPLES = """
import numpy as np
import jax.numpy as jnp
import spmdkit as sk

@sk.samples
def write(program, state):
    params = program.eval_params(state)
    return {"text": f"sum {float(jnp.sum(params['w'])):.3f}", "picture": jnp.ones((2, 2)), "values": params["w"]}

@sk.tracker
def open(run, last_step):
    seen = []
    kinds = frozenset({"text", "image", "histogram"})
    write = lambda kind, record: seen.append((kind, record["step"], *(k for k in record if k != "step")))
    return sk.Tracker(write, kinds, close=lambda: (run.directory / "seen").write_text(repr(seen)))
"""


def test_samples_are_written_to_the_trackers(tmp_path):
    (tmp_path / "mine.py").write_text(SAMPLES)
    hook = {"samples": {"fn": f"{tmp_path}/mine.py:write", "every": 5}}
    train(tmp_path, hook, steps=6, log={"trackers": [f"{tmp_path}/mine.py:open"]}, mesh={"fsdp": 2})
    kinds = (("text", "text"), ("image", "picture"), ("histogram", "values"))
    expected = [(kind, step, name) for step in (5, 6) for kind, name in kinds]
    assert (tmp_path / "run" / "seen").read_text() == repr(expected)
    with pytest.raises(ConfigError, match=r"mine\.py has no 'wrote'"):
        train(tmp_path / "wrong", {"samples": {"fn": f"{tmp_path}/mine.py:wrote"}})
