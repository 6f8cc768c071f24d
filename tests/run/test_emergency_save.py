"""What ends a run in the user's own code keeps the work: the state of the last good step is saved, and a restart goes
on bit for bit."""

import json
import sys
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit import checkpoint
from spmdkit.errors import NonFiniteError, UserCodeError
from tests.support import small_runs

X = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)
BAD = 55
"""A row of batch 7 that no start looks at (data/fingerprint.py): one that fails once fails in training."""


class Rows:
    """Raises at row `bad`, `times` times."""

    def __init__(self, bad=None, error=None, times=10**6):
        self.bad, self.error, self.times = bad, error, times

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        if i == self.bad and self.times > 0:
            self.times -= 1
            raise self.error
        return X[i]


def train(tmp_path, rows, *hooks, name="run", scale=1.0, **changes):
    def loss_fn(params, batch, key):
        loss = sk.mean((batch @ params["w"] - scale * batch.sum(-1)) ** 2)
        return loss, {"rows": sk.sum(jnp.ones(len(batch))), "total": sk.sum(batch[:, 0])}

    values = {
        "run_dir": str(tmp_path / name),
        "steps": 12,
        "batch_size": 8,
        "devices": "cpu:1",
        "mesh": {},
        "data": {"shuffle": False},
        "log": {"every_steps": 1, "progress": "plain"},
        "checkpoint": {"every_steps": 100},
    }
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.adam(0.1), train_data=rows, hooks=hooks)
    return small_runs.train(tmp_path, task, **{**values, **changes})


def lines(tmp_path, name="metrics.jsonl", run="run"):
    return [json.loads(line) for line in (tmp_path / run / name).read_text().splitlines()]


def losses(tmp_path, run="run"):
    return {m["step"]: m["loss"] for m in lines(tmp_path, run=run) if "split" not in m}


def saved(tmp_path, run="run"):
    return [row["step"] for row in checkpoint.ls(tmp_path / run / "checkpoints")]


@pytest.mark.forms(1)
@pytest.mark.parametrize("error", [OSError("disk gone"), SystemExit(0)], ids=lambda e: type(e).__name__)
def test_data_error_saves_and_restart_equals_clean_run(tmp_path, error, capfd):
    train(tmp_path, Rows(), name="clean")
    with pytest.raises(UserCodeError, match=rf"batch of step 7 .*train_data\[55\] raised {type(error).__name__}"):
        train(tmp_path, Rows(BAD, error))
    assert saved(tmp_path) == [6]
    assert "step 6, the last good one, is saved" in capfd.readouterr().out
    last = lines(tmp_path, "events.jsonl")[-1]
    assert (last["event"], last["code"]) == ("fault", 70)
    train(tmp_path, Rows())
    assert losses(tmp_path) == losses(tmp_path, "clean")


@pytest.mark.forms(1)
@pytest.mark.parametrize("error", [ValueError("mine"), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_hook_error_saves_its_step(tmp_path, error):
    def after_step(run, step, *_):
        if step == 5:
            raise error

    with pytest.raises(UserCodeError, match=rf"hook 'bad': after_step raised {type(error).__name__}"):
        train(tmp_path, Rows(), sk.Hook("bad", after_step=after_step))
    assert saved(tmp_path) == [5]


def test_it_is_not_saved_where_that_was_chosen(tmp_path):
    with pytest.raises(UserCodeError):
        train(tmp_path, Rows(BAD, OSError()), checkpoint={"every_steps": 4, "emergency_timeout_s": None})
    assert saved(tmp_path) == [4]


def test_slow_emergency_save_is_abandoned(tmp_path, monkeypatch, capfd):
    entered, released = threading.Event(), threading.Event()

    def slow(self, *args, **more):
        entered.set()
        released.wait(3600)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", slow)
    with pytest.raises(UserCodeError):
        train(tmp_path, Rows(BAD, OSError()), checkpoint={"emergency_timeout_s": 0.5})
    assert entered.wait(10), "a busy machine may come to it after the half second"
    released.set()
    assert "step 6, the last good one, was not saved within 0.5 s" in capfd.readouterr().out


def test_nonfinite_state_is_not_saved(tmp_path, capfd):
    data = X.copy()
    data[40] = np.inf

    class Bad(Rows):
        def __getitem__(self, i):
            super().__getitem__(i)
            return data[i]

    with pytest.raises((UserCodeError, NonFiniteError)):
        train(tmp_path, Bad(BAD, OSError()), on_nonfinite="continue", checkpoint={"every_steps": 4})
    assert saved(tmp_path) == [4]
    assert "is not finite" in capfd.readouterr().out


def test_skipped_rows_are_repeated_after_a_restart(tmp_path):
    """Row 55 fails once: it is left out of batch 7, read again in the next epoch; a run that is stopped between and
    started again gives the same."""
    options = {
        "steps": 24,
        "data": {"shuffle": False, "max_bad_examples": 2},
        "checkpoint": {"every_steps": 3, "keep": 100},
    }
    train(tmp_path, Rows(BAD, OSError("bad"), times=1), name="whole", **options)
    (news,) = [e for e in lines(tmp_path, "events.jsonl", "whole") if e["event"] == "unreadable_row"]
    assert (news["row"], news["batch"], news["process"]) == (BAD, 7, 0) and "skipped" in news["done"]

    def stop(run, step, *_):
        return sk.Stop(42) if step == 6 else None

    with pytest.raises(sk.errors.Preempted):
        train(tmp_path, Rows(BAD, OSError("bad"), times=1), sk.Hook("stop", after_step=stop), **options)
    record = checkpoint.Checkpoints(tmp_path / "run" / "checkpoints", is_main=False).read_record(6)
    assert record["skipped_rows"] == [[7, BAD]], "read ahead, and so known before its step"
    train(tmp_path, Rows(), **options)
    assert losses(tmp_path) == losses(tmp_path, "whole")


@pytest.mark.slow
def test_skipped_row_is_padding_in_short_batches(tmp_path):
    """95 rows in batches of 8; row 55 counts in no batch, and no other one twice; also after a restart that could read
    it."""

    class Fewer(Rows):
        def __len__(self):
            return 95

    options = {
        "data": {"shuffle": False, "max_bad_examples": 1, "drop_remainder": False},
        "checkpoint": {"every_steps": 6},
        "steps": 12,
    }
    train(tmp_path, Fewer(BAD, OSError("bad")), **options | {"steps": 8})
    train(tmp_path, Fewer(), **options)
    found = {m["step"]: (m["rows"], m["total"]) for m in lines(tmp_path) if "split" not in m}
    assert {step: rows for step, (rows, _) in found.items()} == {step: 8 - (step in (7, 12)) for step in range(1, 13)}
    assert found[7][1] == pytest.approx(X[48:55, 0].sum(), rel=1e-5)
    assert sum(total for _, total in found.values()) == pytest.approx(X[:95, 0].sum() - X[BAD, 0], rel=1e-4)


def test_retried_row_is_reported_and_changes_nothing(tmp_path, capfd):
    train(tmp_path, Rows(), name="clean")
    train(tmp_path, Rows(BAD, OSError("net gone"), times=2), data={"shuffle": False, "retries": 2})
    assert losses(tmp_path) == losses(tmp_path, "clean")
    out = capfd.readouterr().out
    assert "process 0: train_data[55] could not be read (OSError: net gone): read at attempt 3" in out


def test_exit_in_a_tracker_does_not_end_run(tmp_path):
    (tmp_path / "leaving.py").write_text(
        "import sys\nimport spmdkit as sk\n@sk.tracker\ndef leaving(run, last_step):\n    return sk.Tracker(lambda "
        "kind, record: sys.exit(0))\n"
    )
    sys.modules.pop("spmdkit_task_leaving", None)
    result = train(tmp_path, Rows(), log={"every_steps": 1, "trackers": [f"{tmp_path}/leaving.py:leaving"]})
    assert int(result.state.step) == 12
