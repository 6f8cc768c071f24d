"""What every hook of spmdkit/run/hooks keeps to; a new one is tested because its file exists."""

import importlib
import inspect
import json

import pytest

import spmdkit as sk
from spmdkit.run import hooks
from spmdkit.run.hooks.base import Action, Hook

PLAIN = {"task": "a.py:t", "checkpoint": None}
EVERYTHING = {
    "task": "a.py:t",
    "steps": 40,
    "eval": {"every_steps": 10},
    "checkpoint": {"every_steps": 20, "every_seconds": 5.0},
    "profile": {"start": 5, "steps": 2},
    "log": {"every_steps": 5},
    "data": {"retries": 1},
    "check_copies": {"every_steps": 10},
    "on_spike": {"then": "skip"},
    "preemption": [{"file": {"path": "preempt"}}],
}
NAMES = hooks.names()
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


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_is_made_from_a_config_alone_under_the_name_of_its_file(name):
    assert inspect.getdoc(module(name)), f"{name}.py does not say what it does"
    assert list(inspect.signature(module(name).make).parameters) == ["config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPMDKIT_DRILL_FILE")
        assert isinstance(module(name).make(sk.Config(**PLAIN)), Hook | None)
    hook = module(name).make(sk.Config(**EVERYTHING))
    assert isinstance(hook, Hook), "with everything asked for, every hook has something to do"
    assert hook.name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_takes_what_it_is_called_with_and_its_state_is_json(name):
    hook = module(name).make(sk.Config(**EVERYTHING))
    used = [what for what in CALLS if getattr(hook, what) is not None]
    assert used, "a hook without a call does nothing"
    for what in used:
        inspect.signature(getattr(hook, what)).bind(*[None] * CALLS[what])
    if hook.state is not None:
        saved = hook.state()
        assert json.loads(json.dumps(saved, allow_nan=False)) == saved
        hook.restore(saved)
        assert hook.state() == saved


def test_two_hooks_made_for_two_runs_share_nothing():
    """State lives in the functions that `make` returns: a second run in the process begins anew."""
    for name in NAMES:
        first, second = (module(name).make(sk.Config(**EVERYTHING)) for _ in range(2))
        for what in CALLS:
            ours, theirs = getattr(first, what), getattr(second, what)
            assert ours is None or ours is not theirs, f"{name}.{what} is one function for all runs"


def test_orders_differ_so_that_what_comes_first_is_never_by_chance():
    orders = [hook.order for hook in hooks.of_run(sk.Config(**EVERYTHING), [])]
    assert len(set(orders)) == len(orders)


def test_actions_say_whether_every_process_knows_them_and_can_be_told_to_others():
    from spmdkit.run.hooks.base import from_json, to_json

    for kind in Action.__args__:
        if kind is sk.Replace:
            continue
        action = kind()
        assert action.known is False, "what a user asks for is agreed on"
        assert from_json(json.loads(json.dumps(to_json(action)))) == action
