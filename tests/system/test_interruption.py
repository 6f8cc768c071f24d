"""Killed, stopped, continued: a run ends with the same bits as an undisturbed one. A hundred kills of four processes:
tests/tools/drill/test_kills.py."""

from __future__ import annotations

import signal
import time

import pytest

from spmdkit.foundation.run_status import unfinished

pytestmark = pytest.mark.processes


def saving(folder):
    path = folder.path / "run" / "checkpoints"
    return path.is_dir() and any("tmp" in p.name for p in path.iterdir())


def num_lines(folder):
    try:  # a run that was killed before it saved has its metrics renamed by the next, at any moment
        return (folder.path / "run" / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def test_killed_and_preempted_run_ends_with_same_bits(folder, undisturbed, helpers):
    """Killed while it saves, stopped by SIGTERM, and continued to its end."""
    child = folder.start("train", "run.yaml", "task_args.pause_s=0.0003")
    helpers.wait_until(lambda: saving(folder) or child.poll() is not None)
    assert child.poll() is None, "the kill hit no save"
    found = unfinished(folder.path / "run")
    assert found is not None and found.alive and "still running" in found.message()
    helpers.end(child)
    found = unfinished(folder.path / "run")
    assert found is not None and found.alive is False and found.step >= 1
    child, before = folder.start("train", "run.yaml", "task_args.pause_s=0.001"), num_lines(folder)
    helpers.wait_until(lambda: num_lines(folder) > before or child.poll() is not None)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 42 and "saved. Start the same command again" in output, output
    code, output = folder.train()
    assert code == 0, output
    folder.assert_equals(undisturbed)


@pytest.mark.slow
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
