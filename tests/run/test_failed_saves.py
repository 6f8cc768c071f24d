"""A save that fails does not end a run at once; a run whose last save did not commit never ends with 0."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import ls
from spmdkit.checkpoint import record as records
from spmdkit.errors import CheckpointWriteError, UserCodeError
from spmdkit.run.recovery import save_retries
from tests.support.small_runs import events, line_task, steps, train


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full at the steps in the list, as often as they stand there; `fired` counts."""
    real, fired = records.write_record, []

    def write(folder, record):
        if record.step in disk.full:
            disk.full.remove(record.step)
            fired.append(record.step)
            raise OSError(disk.number, os.strerror(disk.number))
        real(folder, record)

    monkeypatch.setattr(records, "write_record", write)
    monkeypatch.setattr(save_retries, "SAVE_RETRY_S", 0.0)
    disk = SimpleNamespace(full=[], fired=fired, number=errno.ENOSPC)
    yield disk
    assert fired, "the injection did not fire"


def saved(folder):
    names = [path.name for path in (folder / "run/checkpoints").iterdir()]
    assert not [name for name in names if not name.isdigit()], names
    return [row["step"] for row in ls(folder / "run/checkpoints")]


@pytest.mark.forms(1)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_failed_save_is_retried_at_the_next_interval(tmp_path, disk, capsys, number):
    """tests/system/test_disk_trouble.py has file systems that answer so."""
    disk.full, disk.number = [10], number
    result = train(tmp_path, checkpoint={"every_steps": 5, "keep": 9})
    out = capsys.readouterr().out
    assert "WARNING: saving step 10" in out and os.strerror(number) in out and "1 of checkpoint.max_failures 3" in out
    assert saved(tmp_path) == [5, 15, 20] and steps(tmp_path) == [1, 5, 10, 15, 20]
    assert [(e["step"], e["failures"]) for e in events(tmp_path, "save_failed")] == [(10, 1)]
    undisturbed = train(tmp_path / "other", checkpoint=None)
    assert np.array_equal(result.state.params["w"], undisturbed.state.params["w"])


def test_consecutive_failures_end_the_run_with_74(tmp_path, disk):
    disk.full += [5, 10, 20]
    train(tmp_path, checkpoint={"every_steps": 5, "keep": 9}, steps=30)
    assert saved(tmp_path) == [15, 25, 30]
    disk.full += [35, 40, 45]
    with pytest.raises(
        CheckpointWriteError, match=r"saving step 45 .*intact are 15, 25, 30.* 3 times in a row"
    ) as raised:
        train(tmp_path, checkpoint={"every_steps": 5, "keep": 9}, steps=60)
    assert raised.value.exit_code == 74
    assert saved(tmp_path) == [15, 25, 30]


@pytest.mark.slow
def test_one_permitted_failure_ends_the_run(tmp_path, disk):
    disk.full += [5]
    with pytest.raises(CheckpointWriteError, match="saving step 5"):
        train(tmp_path, checkpoint={"every_steps": 5, "max_failures": 1})


def test_last_save_is_retried_before_the_end(tmp_path, disk):
    disk.full += [20, 20]
    train(tmp_path, checkpoint={"every_steps": None})
    assert saved(tmp_path) == [20] and disk.fired == [20, 20]
    disk.full += [40] * 9
    with pytest.raises(CheckpointWriteError, match=r"saving step 40 .* 3 times in a row"):
        train(tmp_path, checkpoint={"every_steps": None}, steps=40)
    assert saved(tmp_path) == [20] and disk.fired[2:] == [40] * 3
    assert not [e for e in events(tmp_path, "stopped") if e["step"] == 40]


def test_slow_save_and_waiting_training_are_reported(tmp_path, monkeypatch, capsys):
    real = records.write_record

    def write(folder, record):
        time.sleep(0.5)
        real(folder, record)

    monkeypatch.setattr(records, "write_record", write)
    monkeypatch.setattr(save_retries, "SLOW_SAVE_S", 0.0)
    monkeypatch.setattr(save_retries, "SAVE_BLOCKED_S", 0.2)
    train(tmp_path, log={"every_steps": 1, "progress": "plain"})
    out = capsys.readouterr().out
    assert "note: saving step 5 has taken" in out and "training waited" in out
    assert events(tmp_path, "save_slow")[0]["step"] == 5


def test_emergency_save_works_after_a_failed_save(tmp_path, disk):
    disk.full += [5]

    def boom(run, step, state, metrics):
        if step == 7:
            raise ValueError("boom")

    task = dataclasses.replace(line_task(), hooks=[sk.Hook("boom", after_step=boom)])
    with pytest.raises(UserCodeError, match="boom"):
        train(tmp_path, task, log={"every_steps": 100, "progress": "plain"})
    assert saved(tmp_path) == [7]


@pytest.mark.slow
def test_next_best_replaces_a_lost_best(tmp_path, disk):
    disk.full += [6]
    climbing = dataclasses.replace(line_task(), optimizer=optax.sgd(lambda count: jnp.where(count < 6, 0.1, -0.05)))
    best = {"metric": "loss", "mode": "min"}
    train(tmp_path, climbing, checkpoint={"every_steps": None, "best": best, "keep": 9}, eval={"every_steps": 3})
    assert saved(tmp_path) == [3, 9, 20]
