"""Killed, stopped, continued: a run ends with the same bits as an undisturbed one. A hundred kills of four processes:
tests/tools/drill/test_kills.py."""

from __future__ import annotations

import random
import signal
import time

import pytest

pytestmark = pytest.mark.processes


def ls_checkpoints(folder):
    path = folder.path / "run" / "checkpoints"
    return sorted(int(p.name) for p in path.glob("*") if p.name.isdigit()) if path.is_dir() else []


def saving(folder):
    path = folder.path / "run" / "checkpoints"
    return path.is_dir() and any("tmp" in p.name for p in path.iterdir())


def num_lines(folder):
    try:  # a run that was killed before it saved has its metrics renamed by the next, at any moment
        return (folder.path / "run" / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def test_killed_run_ends_with_the_same_bits(folder, undisturbed, helpers):
    """Killed at random moments, and while it saves."""
    rng, kills = random.Random(1), {"running": 0, "saving": 0}
    for number in range(2):
        moment = "saving" if number % 2 else "running"
        child = folder.start("train", "run.yaml", "task_args.pause_s=0.0003")
        before = num_lines(folder)
        reached = lambda before=before, moment=moment: (
            saving(folder) if moment == "saving" else num_lines(folder) > before
        )
        helpers.wait_until(lambda reached=reached, child=child: reached() or child.poll() is not None)
        if moment == "running":
            time.sleep(rng.uniform(0, 0.3))
        kills[moment] += child.poll() is None
        helpers.end(child)
    assert all(kills.values()), f"no kill hit a live run in each state: {kills}"
    code, output = folder.train()
    assert code == 0, output
    folder.assert_equals(undisturbed)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signal_saves_and_restart_continues(folder, undisturbed, helpers, number):
    child = folder.start("train", "run.yaml", "task_args.pause_s=0.001", "checkpoint.every_steps=null")
    helpers.wait_until(lambda: num_lines(folder) >= 3)
    child.send_signal(number)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 42, output
    assert "saved. Start the same command again" in output
    assert len(ls_checkpoints(folder)) == 1
    code, output = folder.train()
    assert code == 0, output
    folder.assert_equals(undisturbed)


def test_second_ctrl_c_exits_immediately(folder, helpers):
    child = folder.start("train", "run.yaml", "task_args.pause_s=0.3")
    helpers.wait_until(lambda: num_lines(folder) >= 1)
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode == 130


def test_finished_run_reports_and_changes_nothing(undisturbed):
    before = (undisturbed.path / "run" / "metrics.jsonl").read_bytes()
    code, output = undisturbed.train()
    assert code == 0
    assert "already finished: step 60 of 60" in output
    assert (undisturbed.path / "run" / "metrics.jsonl").read_bytes() == before
