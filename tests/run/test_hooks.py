"""What hooks can do: stop, save, evaluate, replace, go back; inside the step; across a restart bit for bit; each of
them in one file."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit import checkpoint
from spmdkit.errors import ConfigError, NonFiniteError, Preempted, UserCodeError
from spmdkit.run.hooks.base import Decision, decide
from tests.support import small_runs

X = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)


def init(key):
    return {"w": jnp.zeros((3,))}


def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2 + 0.01 * jax.random.normal(key))


def task(*hooks, **changes):
    values = {"train_data": X, "eval_data": X[:40], "hooks": hooks, **changes}
    return sk.Task(init, loss_fn, optax.sgd(0.05, momentum=0.9), **values)


def train(tmp_path, *hooks, task=task, **changes):
    values = {"steps": 12, "batch_size": 16, "checkpoint": {}, "log": {"every_steps": 1, "progress": "plain"}}
    return small_runs.train(tmp_path, task(*hooks), **{**values, **changes})


def lines(tmp_path, name="metrics.jsonl"):
    return small_runs.lines(tmp_path, name)


def losses(tmp_path):
    return {m["step"]: m["loss"] for m in lines(tmp_path) if "split" not in m}


def saved(tmp_path):
    return [row["step"] for row in checkpoint.ls(tmp_path / "run" / "checkpoints")]


def at(wanted, action):
    """Returns what a hook calls after a step: it asks for `action` at step `wanted`."""
    return lambda run, step, *_: action if step == wanted else None


def test_stop_saves_and_finishes_the_run(tmp_path, capfd):
    hook = sk.Hook("enough", after_step=at(5, sk.Stop(why="it is enough")))
    assert not train(tmp_path, hook).already_finished
    assert saved(tmp_path) == [5] and list(losses(tmp_path)) == [1, 2, 3, 4, 5]
    last = lines(tmp_path, "events.jsonl")[-1]
    assert (last["event"], last["code"], last["why"]) == ("stopped", 0, "it is enough")
    assert train(tmp_path, hook).already_finished
    assert "already finished: step 5 of 12" in capfd.readouterr().out
    assert int(train(tmp_path, hook, steps=8).state.step) == 8  # more was asked for


def test_failure_stop_saves_nothing(tmp_path):
    with pytest.raises(NonFiniteError, match="it runs away"):
        train(tmp_path, sk.Hook("guard", after_step=at(5, sk.Stop(77, "it runs away"))), checkpoint={"every_steps": 3})
    assert saved(tmp_path) == [3]


def test_save_and_evaluate_happen_once_at_their_step(tmp_path):
    hooks = [
        sk.Hook("look", every=4, after_step=lambda run, step, *_: sk.Evaluate()),
        sk.Hook("keep", after_eval=lambda run, step, values: sk.Save()),
    ]
    train(tmp_path, *hooks, eval={"every_steps": 8}, checkpoint={"every_steps": 8, "keep": 9})
    assert [m["step"] for m in lines(tmp_path) if "split" in m] == [4, 8, 12]
    assert saved(tmp_path) == [4, 8, 12]


def test_training_continues_with_the_replaced_state(tmp_path):
    def halve(run, step, state, metrics):
        return sk.ReplaceState(state.replace(params=jax.tree.map(lambda x: x * 0, state.params))) if step == 6 else None

    found = losses_of(tmp_path, sk.Hook("halve", after_step=halve))
    assert found[6] < found[7] and found[7] == pytest.approx(float(np.mean(X.sum(-1) ** 2)), rel=0.6)
    with pytest.raises(ConfigError, match=r"sk\.ReplaceState at step 2: the new state differs in shape: .*step"):
        train(
            tmp_path / "b",
            sk.Hook(
                "wrong",
                after_step=lambda run, step, state, _: sk.ReplaceState(state.replace(step=0.5)) if step == 2 else None,
            ),
        )


def losses_of(tmp_path, *hooks, **changes):
    train(tmp_path, *hooks, **changes)
    return losses(tmp_path)


def test_rollback_repeats_steps_and_rewinds_records(tmp_path):
    undisturbed = train(tmp_path / "a", checkpoint={"every_steps": 3, "keep": 9})
    once = []

    def back(run, step, state, metrics):
        if step == 8 and not once:
            once.append(step)
            return sk.Rollback(to_step=5)

    result = train(tmp_path / "b", sk.Hook("back", after_step=back), checkpoint={"every_steps": 3, "keep": 9})
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert saved(tmp_path / "b") == saved(tmp_path / "a") == [3, 6, 9, 12]
    np.testing.assert_array_equal(result.state.params["w"], undisturbed.state.params["w"])
    events = lines(tmp_path / "b", "events.jsonl")
    (event,) = [e for e in events if e["event"] == "rolled_back"]
    assert (event["step"], event["from_step"]) == (3, 8)
    assert not [e for e in events if e["event"] == "save_failed"]  # step 6 was deleted, and is saved a second time


@pytest.mark.slow
def test_rollback_skips_batches_across_a_restart(tmp_path):
    bad, seen = 7, []

    def guard(run, step, state, metrics):
        if step == 8 and not run.program.schedule.skipped:
            return sk.Rollback(to_step=6, skip_batches=2)

    def watch(run, step, state, metrics):
        seen.append(run.program.schedule.number(step))
        if step == 10 and len(seen) < 13:
            return sk.Stop(42, "the test")

    hooks = [sk.Hook("guard", after_step=guard), sk.Hook("watch", after_step=watch)]
    with pytest.raises(Preempted):
        train(tmp_path, *hooks, checkpoint={"every_steps": 6, "keep": 9})
    train(tmp_path, *hooks, checkpoint={"every_steps": 6, "keep": 9})
    assert seen == [1, 2, 3, 4, 5, 6, bad, 8, 9, 10, 11, 12, 13, 14]
    assert list(losses(tmp_path)) == list(range(1, 13))


def test_endless_rollback_is_refused(tmp_path):
    with pytest.raises(UserCodeError, match="from step 4 to step 3 for the second time"):
        train(tmp_path, sk.Hook("back", after_step=at(4, sk.Rollback())), checkpoint={"every_steps": 3})


def test_strongest_requested_action_wins():
    assert decide([sk.Save(), sk.Evaluate()]) == Decision(True, True)
    assert decide([sk.Evaluate(), sk.Stop(0, "a"), sk.Rollback(), sk.Stop(77, "b")]) == Decision(turn=sk.Stop(77, "b"))
    assert decide([sk.Evaluate(), sk.Stop(42), sk.ReplaceState(1)]) == Decision(True, True, sk.Stop(42))
    assert decide([sk.Save(), sk.Rollback(6), sk.Rollback(3), sk.Rollback()]) == Decision(turn=sk.Rollback(3))
    assert decide([sk.Save(), sk.ReplaceState(1)]) == Decision(False, True, sk.ReplaceState(1))


@pytest.mark.slow
def test_rollback_before_all_checkpoints_is_refused(tmp_path):
    settings = {"checkpoint": {"every_steps": 2, "keep": 2}}
    with pytest.raises(
        UserCodeError, match=r"back to step 3, and all checkpoints are newer, up to step 8\..*keep \(2\)"
    ):
        train(tmp_path / "a", sk.Hook("back", after_step=at(9, sk.Rollback(3))), **settings)
    once = []
    back = lambda run, step, *_: once.append(step) or sk.Rollback(0) if step == 9 and not once else None
    assert losses_of(tmp_path / "b", sk.Hook("back", after_step=back), **settings) == losses_of(
        tmp_path / "c", **settings
    )


def skip_where(bad):
    def skip(old, new, metrics):
        keep = jax.tree.map(lambda a, b: jnp.where(bad(old), a, b), old, new)
        return keep.replace(step=new.step), metrics | {"skipped": bad(old).astype(jnp.float32)}

    return skip


@pytest.mark.forms(1)
@pytest.mark.parametrize("view", ["global", "replica"])
def test_in_step_hooks_run_in_their_order(tmp_path, view):
    def step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss, **metrics}

    hooks = [
        sk.Hook("second", order=2, in_step=lambda old, new, m: (new, m | {"twice": 2 * m["skipped"]})),
        sk.Hook("first", order=1, in_step=skip_where(lambda old: old.step >= 4)),
    ]
    own = lambda *hooks: task(*hooks, train_step=step, view=view)
    result = train(tmp_path / "a", *hooks, task=own, steps=8)
    assert [m["twice"] for m in lines(tmp_path / "a") if "split" not in m] == [0.0] * 4 + [2.0] * 4
    short = train(tmp_path / "b", steps=4, task=lambda *hooks: task(train_step=step, view=view))
    np.testing.assert_array_equal(result.state.params["w"], short.state.params["w"])


def test_in_step_hook_must_keep_the_state(tmp_path):
    hook = sk.Hook(
        "cast", in_step=lambda old, new, m: (new.replace(params={"w": new.params["w"].astype(jnp.bfloat16)}), m)
    )
    with pytest.raises(ConfigError, match="changed the state: 'params/w' was float32"):
        train(tmp_path, hook)


MINE = """
import math
import numpy as np
import optax
import spmdkit as sk
from test_hooks import init, loss_fn, task as made, X

task = made()

@sk.hook
def patience(evaluations=2):
    seen = {"best": 1e9, "since": 0}

    def after_eval(run, step, values):
        better = values["loss"] < 0.9 * seen["best"]
        seen.update(best=min(values["loss"], seen["best"]), since=0 if better else seen["since"] + 1)
        run.write({"step": step, "split": "patience", "since": seen["since"]})
        if seen["since"] >= evaluations:
            return sk.Stop(why=f"no better since {evaluations} evaluations")

    return sk.Hook("patience", after_eval=after_eval, state=lambda: dict(seen), restore=seen.update)

note = sk.Hook("note", begin=lambda run, step, state: run.message(f"begin at {step}"), end=lambda run, step, state: run.message("the end"))
"""  # noqa: E501


@pytest.fixture
def mine(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "test_hooks", sys.modules[__name__])
    (tmp_path / "mine.py").write_text(MINE)

    def run(name, **changes):
        text = {
            "task": "mine.py:task",
            "run_dir": name,
            "steps": 30,
            "batch_size": 16,
            "devices": "cpu:2",
            "mesh": {"data": 2},
            **changes,
        }
        (tmp_path / "run.yaml").write_text(json.dumps(text))
        return sk.train(tmp_path / "run.yaml")

    return run


def test_user_hook_continues_bitwise_after_a_restart(mine, tmp_path, capfd):
    settings = {"eval": {"every_steps": 2}, "log": {"every_steps": 2, "progress": "plain"}}
    hooks = [{"mine.py:patience": {"evaluations": 3}}, "mine.py:note"]
    whole = mine("whole", hooks=hooks, **settings)
    stopped_at = int(whole.state.step)
    assert 6 < stopped_at < 30
    assert (
        "begin at 0" in (printed := capfd.readouterr().out) and "the end" in printed and "no better since 3" in printed
    )
    with pytest.raises(Preempted):
        train_until(mine, stopped_at - 3, hooks, settings)
    again = mine("parts", hooks=hooks, **settings)
    assert int(again.state.step) == stopped_at
    np.testing.assert_array_equal(again.state.params["w"], whole.state.params["w"])
    same = [[m for m in lines_of(tmp_path / name) if m.get("split")] for name in ("whole", "parts")]
    assert same[0] == same[1] and same[0][-1]["since"] == 3


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_until(mine, step, hooks, settings):
    from spmdkit.run import run as records

    original = records.hooks.of_run
    with pytest.MonkeyPatch.context() as patch:
        stop = sk.Hook("stop", after_step=at(step, sk.Stop(42, "the test")))
        patch.setattr(records.hooks, "of_run", lambda config, own: [*original(config, own), stop])
        mine("parts", hooks=hooks, **settings)


def test_what_is_wrong_with_a_hook_is_said(mine, tmp_path):
    with pytest.raises(
        ConfigError, match=r"hooks: os:system is a function of .* Write one, in a file of yours: my_hook\.py:hook"
    ):
        mine("a", hooks=["os:system"])
    with pytest.raises(
        ConfigError, match=r"do not fit mine\.py:patience\(evaluations=2\).* Did you mean 'evaluations'"
    ):
        mine("a", hooks=[{"mine.py:patience": {"evaluation": 3}}])
    with pytest.raises(ConfigError, match=r"hooks: mine\.py:note is a hook, and the options \['a'\] have no effect"):
        mine("a", hooks=[{"mine.py:note": {"a": 3}}])
    with pytest.raises(ConfigError, match="two are called 'note'"):
        mine("a", hooks=["mine.py:note", "mine.py:note"])
    with pytest.raises(ConfigError, match=r"Task\.hooks holds int\. .* Write hooks=\[sk\.Hook"):
        train(tmp_path, 3)


def test_mistakes_of_hooks_are_user_errors(tmp_path):
    with pytest.raises(UserCodeError, match=r"hook 'bad': after_step raised ZeroDivisionError at .*test_hooks"):
        train(tmp_path / "a", sk.Hook("bad", after_step=lambda run, step, *_: 1 / 0))
    with pytest.raises(ConfigError, match=r"hook 'bad': after_step returned int\. .* Return sk\.Stop"):
        train(tmp_path / "b", sk.Hook("bad", after_step=lambda run, step, *_: 3))
    with pytest.raises(ConfigError, match="hook 'bad': state returned a value that JSON cannot represent"):
        train(tmp_path / "c", sk.Hook("bad", state=lambda: math.nan, restore=print))
    with pytest.raises(ConfigError, match="hook 'bad' has state only"):
        sk.Hook("bad", state=dict)
    with pytest.raises(ConfigError, match="on='some' and every=0"):
        sk.Hook("bad", on="some", every=0)


def test_bincounts_are_written_to_their_own_file(tmp_path):
    def counted(params, batch, key):
        metrics = {"signs": sk.bincount((batch > 0).astype(jnp.int32), 2), "largest": sk.max(batch)}
        return loss_fn(params, batch, jax.random.key(0)), metrics

    def run(steps):
        own = lambda *hooks: sk.Task(init, counted, optax.sgd(0.05), train_data=X, eval_data=X[:40], hooks=hooks)
        changes = {"log": {"every_steps": 2, "progress": "plain"}, "eval": {"every_steps": 2}, "steps": steps}
        return train(tmp_path, task=own, **changes)

    run(2)
    run(4)
    assert all(isinstance(x, int | float | str) for record in lines(tmp_path) for x in record.values())
    assert lines(tmp_path)[-1]["largest"] == float(X[:40].max())
    found = lines(tmp_path, "counts.jsonl")
    assert [(r["step"], r.get("split")) for r in found] == [(1, None), (2, None), (2, "eval"), (4, None), (4, "eval")]
    above = int((X[:40] > 0).sum())
    assert found[-1]["signs"] == [120 - above, above] and all(sum(r["signs"]) == 48 for r in found if "split" not in r)
    best = {"checkpoint": {"best": {"metric": "signs", "mode": "min"}}, "eval": {"every_steps": 2}}
    with pytest.raises(ConfigError, match=r"best\.metric is signs, but the evaluation has largest, loss"):
        train(
            tmp_path / "best", task=lambda: sk.Task(init, counted, optax.sgd(0.05), train_data=X, eval_data=X), **best
        )
