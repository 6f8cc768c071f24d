"""Killed, stopped, continued: a run ends with the same bits as one that nobody touched. A hundred kills of four
processes: tests/tools/drill/test_kills.py."""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import pytest

pytestmark = pytest.mark.processes


def ls_checkpoints(folder, run="run"):
    path = folder.path / run / "checkpoints"
    return sorted(int(p.name) for p in path.glob("*") if p.name.isdigit()) if path.is_dir() else []


def saving(folder):
    path = folder.path / "run" / "checkpoints"
    return path.is_dir() and any("tmp" in p.name for p in path.iterdir())


def same_bits(folder, clean):
    assert folder.metrics() == clean.metrics()
    ours, theirs = folder.params(), clean.params()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def num_lines(folder):
    try:  # a run that was killed before it saved has its metrics renamed by the next, at any moment
        return (folder.path / "run" / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(folder, undisturbed, helpers):
    rng = random.Random(1)
    kills = 0
    for _ in range(3):
        child = folder.start("train", "run.yaml", "task_args.pause_s=0.0003")
        before = num_lines(folder)
        helpers.wait_until(lambda: num_lines(folder) > before or child.poll() is not None)  # noqa: B023
        time.sleep(rng.uniform(0, 0.8))
        kills += child.poll() is None
        helpers.end(child)
    assert kills, "no kill hit a live run"
    code, output = folder.train()
    assert code == 0, output
    same_bits(folder, undisturbed)


def test_a_run_killed_while_it_saves_ends_with_the_same_bits(folder, undisturbed, helpers):
    kills = 0
    for _ in range(3):
        child = folder.start("train", "run.yaml", "task_args.pause_s=0.0003")
        helpers.wait_until(lambda: saving(folder) or child.poll() is not None)  # noqa: B023
        kills += child.poll() is None
        helpers.end(child)
    assert kills, "no kill hit a save"
    code, output = folder.train()
    assert code == 0, output
    same_bits(folder, undisturbed)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(["mesh.data=2", "devices=cpu:2"], marks=pytest.mark.slow),
        ["mesh={fsdp: 4}", "layout.min_shard_bytes=1"],
        pytest.param(["placement.params=host"], marks=pytest.mark.slow),
    ],
)
def test_a_run_continued_on_another_mesh_ends_with_the_same_numbers(folder, undisturbed, mesh):
    code, output = folder.train("steps=60")
    assert code == 0, output
    code, output = folder.train(*mesh)
    assert code == 0, output
    assert "continuing at step 61 of 120" in output
    ours, theirs = folder.params(), undisturbed.params()
    for name in theirs:
        difference = np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name])
        assert difference < 1e-5, (name, difference)
    trained = [[line for line in where.metrics() if "split" not in line] for where in (folder, undisturbed)]
    for ours_line, their_line in zip(*trained, strict=True):
        assert ours_line["step"] == their_line["step"]
        assert ours_line["loss"] == pytest.approx(their_line["loss"], rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_42_and_the_run_goes_on(folder, undisturbed, helpers, number):
    child = folder.start("train", "run.yaml", "task_args.pause_s=0.001", "checkpoint.every_steps=null")
    helpers.wait_until(lambda: num_lines(folder) >= 3)
    child.send_signal(number)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 42, output
    assert "saved. Start the same command again" in output
    assert len(ls_checkpoints(folder)) == 1
    code, output = folder.train()
    assert code == 0, output
    same_bits(folder, undisturbed)


def test_a_second_ctrl_c_leaves_at_once(folder, helpers):
    child = folder.start("train", "run.yaml", "task_args.pause_s=0.3")
    helpers.wait_until(lambda: num_lines(folder) >= 1)
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode == 130


def test_a_finished_run_says_so_and_changes_nothing(undisturbed):
    before = (undisturbed.path / "run" / "metrics.jsonl").read_bytes()
    code, output = undisturbed.train()
    assert code == 0
    assert "already finished: step 120 of 120" in output
    assert (undisturbed.path / "run" / "metrics.jsonl").read_bytes() == before


def test_two_runs_in_one_directory_are_refused(folder, helpers):
    child = folder.start("train", "run.yaml", "task_args.pause_s=0.01")
    try:
        helpers.wait_until(lambda: num_lines(folder) >= 1)
        code, output = folder.train()
        assert code == 78
        assert "in use" in output
        assert child.poll() is None
    finally:
        helpers.end(child)
