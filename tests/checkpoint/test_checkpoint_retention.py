"""Which steps a directory holds, and which of them stay."""

import time

import jax.numpy as jnp
import pytest

from spmdkit.checkpoint import Checkpoints, ignored_entries, inspect, ls
from spmdkit.checkpoint.retention import remove_unfinished
from spmdkit.config.retention import Best, Retention
from spmdkit.errors import CheckpointWriteError

STATE = {"w": jnp.arange(4.0)}


def save_all(checkpoints, losses):
    for step, loss in losses.items():
        checkpoints.save(step, STATE, {}, None if loss is None else {"loss": loss})
    checkpoints.wait()


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_best_survives_retention_and_a_restart(directory, mode, best):
    losses = {1: 5.0, 2: 1.0, 3: 9.0, 4: float("nan"), 5: None, 6: 3.0}
    first = Checkpoints(directory, retention=Retention(keep=1, best=Best(metric="loss", mode=mode)))
    save_all(first, dict(list(losses.items())[:4]))
    first.close()
    second = Checkpoints(directory, retention=Retention(keep=1, best=Best(metric="loss", mode=mode)))
    save_all(second, dict(list(losses.items())[4:]))
    assert second.steps() == [best, 6]
    second.close()


RULES = {
    "newest": (Retention(keep=2), {}, {30, 40}),
    "every nth": (Retention(keep=1, keep_every=20), {}, {20, 40}),
    "smallest": (Retention(keep=1, best=Best(metric="loss", mode="min")), {10: 1.0, 20: 2.0}, {10, 40}),
    "largest": (Retention(keep=1, best=Best(metric="loss", mode="max")), {10: 1.0, 20: 2.0}, {20, 40}),
    "no score": (Retention(keep=1, best=Best(metric="loss", mode="min")), {10: None}, {40}),
    "equal scores": (Retention(keep=1, best=Best(metric="loss", mode="min")), {10: 0.5, 20: 0.5, 30: 0.7}, {20, 40}),
}
"""A row for each retention rule: rules, scores of steps, the steps of 10, 20, 30, 40 to keep."""


@pytest.mark.parametrize(("rules", "scores", "kept"), RULES.values(), ids=RULES)
def test_rules_select_the_steps_to_keep(rules, scores, kept):
    assert rules.steps_to_keep([10, 20, 30, 40], scores) == kept


def test_step_just_written_is_never_deleted(directory):
    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    save_all(checkpoints, dict.fromkeys((40, 30)))
    assert checkpoints.steps() == [30, 40]
    checkpoints.close()


def test_foreign_entries_are_ignored_and_listed(directory):
    directory.mkdir()
    (directory / "9").mkdir()
    (directory / "1e3").mkdir()
    (directory / "7").write_text("a file")
    (directory / "007").mkdir()
    (directory / "007" / "record.json").write_text("{}")
    (directory / "notes.txt").write_text("mine")
    checkpoints = Checkpoints(directory)
    assert checkpoints.steps() == [] and checkpoints.latest() is None
    save_all(checkpoints, {3: None})
    assert checkpoints.steps() == [3]
    assert ignored_entries(checkpoints.directory) == ["007", "1e3", "7", "9", "notes.txt"]
    checkpoints.close()


@pytest.mark.parametrize("step", [7, 9, 3])
def test_a_taken_name_is_never_overwritten(directory, step):
    directory.mkdir()
    (directory / "9").mkdir()
    (directory / "7").write_text("a file")
    checkpoints = Checkpoints(directory)
    save_all(checkpoints, {3: None})
    with pytest.raises(CheckpointWriteError, match=f"the folder exists.*Delete or rename .*/{step}"):
        checkpoints.save(step, STATE, {})
    save_all(checkpoints, {20: None})
    assert checkpoints.steps() == [3, 20]
    checkpoints.close()


def test_main_process_removes_unfinished_saves_at_start(directory):
    directory.mkdir()
    for name in ("5.orbax-checkpoint-tmp", "4.deleted.orbax-checkpoint-tmp"):
        (directory / name / "state").mkdir(parents=True)
    Checkpoints(directory, is_main=False, num_processes=2).close()
    assert len(list(directory.iterdir())) == 2
    Checkpoints(directory).close()
    assert list(directory.iterdir()) == []


def test_link_out_of_the_directory_is_not_followed(directory, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    directory.mkdir()
    (directory / "1.orbax-checkpoint-tmp").symlink_to(outside)
    assert remove_unfinished(directory) == []
    assert outside.is_dir()


def test_committed_steps_are_reported_once(directory):
    checkpoints = Checkpoints(directory)
    assert checkpoints.new_commits() == []
    checkpoints.save(1, STATE, {})
    checkpoints.save(2, STATE, {})
    assert checkpoints.wait() == [1, 2]
    assert checkpoints.wait() == [] and checkpoints.new_commits() == []
    checkpoints.save(3, STATE, {})
    assert checkpoints.close() == [3]
    assert checkpoints.close() == []


def test_ls_and_inspect_return_plain_data(directory, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, STATE, {"seed": 3}, {"loss": 0.25, "bad": float("inf")})
    checkpoints.save(2, STATE, {"seed": 3})
    checkpoints.close()
    first, second = ls(directory)
    assert first["bytes"] > 500
    assert {**first, "bytes": 0} == {
        "step": 1,
        "bytes": 0,
        "time": 1234.5,
        "metrics": {"loss": 0.25, "bad": None},
        "best": False,
        "complete": True,
        "problem": None,
        "found": None,
    }
    assert second["step"] == 2
    told = inspect(directory, 1)
    assert told["leaves"] == {"w": {"shape": [4], "dtype": "float32"}}
    assert (told["state_bytes"], told["record"], told["num_processes"]) == (16, {"seed": 3}, 1)
    assert inspect(directory)["step"] == 2
    assert ls(directory / "missing") == []


def test_reading_uses_no_device(directory):
    """`checkpoint ls` must not claim an accelerator that a run is using."""
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, STATE, {})
    checkpoints.close()
    script = (
        "import sys, jax\n"
        "from spmdkit.checkpoint import ls, inspect\n"
        "assert ls(sys.argv[1])[0]['complete'] and inspect(sys.argv[1])['step'] == 1\n"
        "assert not jax._src.xla_bridge.backends_are_initialized()\n"
        "assert 'orbax' not in sys.modules\n"
    )
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, timeout=60)
