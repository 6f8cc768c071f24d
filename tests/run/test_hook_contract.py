"""What every hook of spmdkit/run/hooks keeps to; a new one is tested because its file exists."""

import importlib
import inspect
import json

import pytest

import spmdkit as sk
from spmdkit.foundation import plugins
from spmdkit.run import hooks
from spmdkit.run.hooks.base import Action, Hook
from tests.support.distributions import install

PLAIN = {"task": "a.py:t", "checkpoint": None}
EVERYTHING = {
    "task": "a.py:t",
    "steps": 40,
    "eval": {"every_steps": 10},
    "checkpoint": {"every_steps": 20, "every_seconds": 5.0},
    "profile": {"steps": [5, 6]},
    "log": {"every_steps": 5},
    "data": {"retries": 1, "check": "full"},
    "precision": {"params": "bfloat16"},
    "replica_check": {"every_steps": 10},
    "on_spike": {"action": "skip"},
    "preemption": [{"file": {"path": "preempt"}}],
}
NAMES = plugins.names("default_hooks")
CALLS = {
    "in_step": 3,
    "begin": 3,
    "before_step": 3,
    "after_step": 4,
    "after_eval": 3,
    "after_save": 2,
    "end": 3,
    "state": 0,
    "restore": 1,
}


@pytest.fixture(autouse=True)
def of_a_drill(tmp_path, monkeypatch):
    """One hook takes orders from a file that a drill hands down."""
    (tmp_path / "orders").touch()
    monkeypatch.setenv("SPMDKIT_DRILL_FILE", str(tmp_path / "orders"))


def module(name):
    return importlib.import_module(f"spmdkit.run.hooks.{name}")


def test_hooks_are_found_by_their_files():
    assert {"finite", "evaluation", "saving", "logging", "profile", "signals"} <= set(NAMES)
    assert [hook.name for hook in hooks.of_run(sk.Config(**EVERYTHING), [])] == sorted(
        NAMES, key=lambda name: module(name).make(sk.Config(**EVERYTHING)).order
    )


def check_contract(module, name):
    """Fails unless the module of a hook keeps what base.py says: made from a config alone, and for each run anew."""
    assert inspect.getdoc(module), f"{name}.py does not say what it does"
    assert list(inspect.signature(module.make).parameters) == ["config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPMDKIT_DRILL_FILE")
        assert isinstance(module.make(sk.Config(**PLAIN)), Hook | None)
    hook, of_another_run = (module.make(sk.Config(**EVERYTHING)) for _ in range(2))
    assert isinstance(hook, Hook), "with everything asked for, every hook has something to do"
    assert hook.name == name
    used = [what for what in CALLS if getattr(hook, what) is not None]
    assert used, "a hook without a call does nothing"
    for what in used:
        call = getattr(hook, what)
        assert call is not getattr(of_another_run, what), f"{name}.{what} is one function for all runs"
        try:
            inspect.signature(call).bind(*[None] * CALLS[what])
        except TypeError as error:
            raise AssertionError(f"{name}.{what} does not take what it is called with: {error}") from error
    if hook.state is not None:
        saved = hook.state()
        assert json.loads(json.dumps(saved, allow_nan=False)) == saved, f"{name}: its state is not JSON"
        hook.restore(saved)
        assert hook.state() == saved


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_keeps_the_contract(name):
    check_contract(module(name), name)


COUNTS = '''"""Counts."""
from spmdkit.run.hooks.base import Hook

def make(config):
    seen = {"steps": 0}

    def after_step(run, step, state, metrics):
        seen["steps"] += 1

    return Hook("counts", after_step=after_step, state=lambda: dict(seen), restore=lambda saved: seen.update(saved))
'''


def test_another_distribution_adds_a_hook(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, "default_hooks", "counts", COUNTS)
    assert set(plugins.names("default_hooks")) == {*NAMES, "counts"}
    added = importlib.import_module("counts_plugin")
    check_contract(added, "counts")
    added.make = lambda config, run: None
    with pytest.raises(AssertionError, match="'config', 'run'"):
        check_contract(added, "counts")


def test_orders_of_hooks_differ():
    orders = [hook.order for hook in hooks.of_run(sk.Config(**EVERYTHING), [])]
    assert len(set(orders)) == len(orders)


def test_actions_can_be_sent_to_processes():
    from spmdkit.run.hooks.base import from_json, to_json

    for kind in Action.__args__:
        if kind is sk.ReplaceState:
            continue
        action = kind()
        assert action.known is False, "what a user asks for is agreed on"
        assert from_json(json.loads(json.dumps(to_json(action)))) == action
