"""Where a run goes on: from the newest checkpoint that is as it was written; never from an older one, or from the
start, without a word."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from spmdkit.checkpoint import ls
from spmdkit.cli.checkpoint import checkpoint_rm
from spmdkit.errors import CheckpointError, ConfigError
from spmdkit.foundation import run_status
from spmdkit.metrics import EventLog
from tests.support.small_runs import events, steps, train

STEP_20 = "run/checkpoints/20"


def biggest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def flip_every_array(folder):
    for path in (folder / "state").rglob("d/*"):
        flip(path)


def truncate(folder):
    path = biggest(folder / "state")
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(folder):
    (folder / "state" / "_METADATA").unlink()


def lose_the_record(folder):
    (folder / "record.json").unlink()


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def garble_the_record(folder):
    (folder / "record.json").write_text("[" * 100_000)


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """A run of 20 steps, to be copied, and the parameters after 30 that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("twenty")
    train(folder)
    whole = tmp_path_factory.mktemp("whole")
    shutil.copytree(folder / "run", whole / "run")
    return folder, np.asarray(train(whole, steps=30).state.params["w"])


@pytest.fixture
def saved(twenty, tmp_path):
    shutil.copytree(twenty[0] / "run", tmp_path / "run")
    return tmp_path


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    "damage",
    [flip_every_array, truncate, lose_a_file, lose_the_record, empty, garble_the_record],
    ids=lambda f: f.__name__,
)
def test_damaged_checkpoint_is_quarantined_and_run_continues(saved, twenty, damage, capsys):
    damage(saved / STEP_20)
    result = train(saved, steps=30)
    out = capsys.readouterr().out
    assert "checkpoint 20 is damaged" in out and "20.damaged" in out, out
    assert [(e["name"], e["renamed"]) for e in events(saved, "checkpoint_quarantined")] == [("20", "20.damaged")]
    assert events(saved, "restored")[-1]["step"] == 15
    assert (saved / "run/checkpoints/20.damaged").is_dir()
    assert [row["step"] for row in ls(saved / "run/checkpoints")] == [20, 25, 30]
    assert steps(saved) == [1, 5, 10, 15, 20, 25, 30]
    assert np.array_equal(result.state.params["w"], twenty[1])


@pytest.mark.slow
def test_repeated_damage_of_a_step_is_kept(saved):
    for name in ("20.damaged", "20.damaged.2"):
        lose_a_file(saved / STEP_20)
        train(saved)
        assert (saved / "run/checkpoints" / name).is_dir()


def test_folder_of_a_later_step_is_quarantined(saved, capsys):
    (saved / "run/checkpoints/30").mkdir()
    train(saved, steps=30)
    assert "checkpoint 30 is damaged: it has no record.json" in capsys.readouterr().out
    assert (saved / "run/checkpoints/30.damaged").is_dir()
    assert events(saved, "restored")[-1]["step"] == 20


def test_run_with_damaged_checkpoints_only_changes_nothing(saved):
    folders = sorted((saved / "run/checkpoints").iterdir())
    for folder in folders:
        flip_every_array(folder)
    before = (saved / "run/metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"every checkpoint .* is damaged:\n  20: .*\n  15: .*\n  10: .*\n.*run_dir"
    ) as raised:
        train(saved)
    assert raised.value.exit_code == 79
    assert sorted((saved / "run/checkpoints").iterdir()) == folders
    assert (saved / "run/metrics.jsonl").read_bytes() == before


@pytest.mark.forms(1)
@pytest.mark.parametrize("gone", ["the folder", "its content", "the records"])
def test_run_with_missing_checkpoints_does_not_restart(saved, gone):
    before = (saved / "run/metrics.jsonl").read_bytes()
    if gone == "the records":
        for path in (saved / "run/checkpoints").glob("*/record.json"):
            path.unlink()
    else:
        shutil.rmtree(saved / "run/checkpoints")
    if gone == "its content":
        (saved / "run/checkpoints").mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint.* up to step 20 .*steps 5, 10, 15, 20 as saved.*Restore the folder .*set run_dir.*"
        "step 0: train --allow-change checkpoints",
    ):
        train(saved)
    assert (saved / "run/metrics.jsonl").read_bytes() == before
    train(saved, allow_change=["checkpoints"])
    assert events(saved, "started")[-1]["step"] == 0 and steps(saved) == [1, 5, 10, 15, 20]


def test_missing_newest_steps_are_reported_once(saved, twenty, capsys):
    for step in (15, 20):
        shutil.rmtree(saved / f"run/checkpoints/{step}")
    result = train(saved, steps=30)
    assert "does not have steps 15, 20, which events.jsonl records as saved" in capsys.readouterr().out
    assert [(e["step"], e["steps"]) for e in events(saved, "checkpoints_missing")] == [(10, [15, 20])]
    assert np.array_equal(result.state.params["w"], twenty[1])
    train(saved, steps=30)
    assert len(events(saved, "checkpoints_missing")) == 1


def test_run_with_none_of_its_steps_left_is_refused(saved, tmp_path):
    train(tmp_path / "other", steps=4)
    for step in (10, 15, 20):
        shutil.rmtree(saved / f"run/checkpoints/{step}")
    shutil.copytree(tmp_path / "other/run/checkpoints/4", saved / "run/checkpoints/4")
    with pytest.raises(
        CheckpointError, match=r"holds step 4, which .*step 4: train --allow-change checkpoints"
    ) as error:
        train(saved)
    assert error.value.exit_code == 79
    train(saved, allow_change=["checkpoints"])
    assert events(saved, "restored")[-1]["step"] == 4 and steps(saved)[-1] == 20


@pytest.mark.parametrize(
    ("later", "committed"),
    [
        ([], {5, 10}),
        ([("rolled_back", {"step": 5})], {5}),
        ([("restored", {"step": 7})], {5}),
        ([("started", {"step": 0})], set()),
        ([("checkpoint_removed", {"step": 10})], {5}),
        ([("checkpoint_quarantined", {"name": "5"})], {10}),
        ([("rolled_back", {"step": 5}), ("saved", {"step": 10})], {5, 10}),
    ],
)
def test_committed_steps_follow_events(tmp_path, later, committed):
    log = EventLog(tmp_path / "events.jsonl")
    for name, fields in [("saved", {"step": 5}), ("saved", {"step": 10}), *later]:
        log.write(name, **fields)
    log.close()
    assert run_status.committed_steps(tmp_path) == committed


def test_removed_steps_are_not_missing(saved, capsys):
    checkpoint_rm(str(saved / "run"), [20])
    train(saved, steps=25)
    assert not events(saved, "checkpoints_missing")
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.slow
def test_metrics_of_an_unsaved_run_are_renamed(tmp_path, capsys):
    train(tmp_path, checkpoint=None)
    first = (tmp_path / "run/metrics.jsonl").read_bytes()
    for number in (1, 2):
        train(tmp_path, checkpoint=None)
        assert f"renamed to metrics.{number}.jsonl" in capsys.readouterr().out
    assert (tmp_path / "run/metrics.1.jsonl").read_bytes() == first
    assert steps(tmp_path) == [1, 5, 10, 15, 20]


def test_another_seed_is_refused_before_any_quarantine(saved):
    lose_a_file(saved / STEP_20)
    with pytest.raises(ConfigError, match="seed"):
        train(saved, seed=7)
    assert not (saved / "run/checkpoints/20.damaged").exists()
