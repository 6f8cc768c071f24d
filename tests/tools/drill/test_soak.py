"""`make soak`: its figures, an independent reader of events.jsonl, and a short form with real processes."""

import importlib.util
import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from tests.support.forks import Process

SCRIPT = Path(__file__).parents[3] / "benchmarks/soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_goodput(path):
    """Returns the figures of a run from its events.jsonl: each millisecond is marked as lost to a fault or not."""
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if line["process"] == 0]
    at = [round(datetime.fromisoformat(line["time"]).timestamp() * 1000) for line in lines]
    names = [line["event"] for line in lines]
    start = at[names.index("compiled")]
    lost = np.zeros(max(at) - start + 1, bool)
    for i, line in enumerate(lines):
        if names[i] not in ("restored", "started", "rolled_back") or at[i] <= start:
            continue
        saves = [j for j in range(i) if names[j] == "saved" and lines[j]["step"] <= line["step"]]
        newest = max(saves, key=lambda j: (lines[j]["step"], j), default=None)
        first = start if newest is None else at[newest] - round(1000 * lines[newest]["seconds"])
        later = [at[j] for j in range(i, len(lines)) if names[j] == "compiled"]
        last = at[i] if names[i] == "rolled_back" else (later or [max(at)])[0]
        lost[first - start : last - start] = True
    saved = [j for j, name in enumerate(names) if name == "saved"]
    held = [lines[j]["held_s"] for j in saved if not lost[max(0, at[j] - start - 1) : at[j] - start + 1].any()]
    wall_s, faults_s = (max(at) - start) / 1000, lost.sum() / 1000
    good = 1 - (faults_s + sum(held)) / wall_s
    return {"wall_s": wall_s, "faults_s": faults_s, "checkpoints_s": sum(held), "goodput": good}


def events(*rows):
    """Returns events of (second, name, step), and for `saved` (second, name, step, seconds, held_s)."""
    found = []
    for second, name, step, *saved in rows:
        time = f"2026-01-01T00:{int(second // 60):02}:{second % 60:06.3f}Z"
        found.append({"event": name, "time": time, "process": 0, "step": step})
        found[-1] |= dict(zip(("seconds", "held_s"), saved, strict=False))
    return [{**found[0], "process": 1, "time": "2026-01-01T00:00:00.000Z"}, *found]


START = ((1, "started", 0), (3, "compiled", 0))
AGAIN = ((20, "restored", 5), (22, "compiled", 5))
HISTORIES = {
    "undisturbed": [*START, (10, "saved", 5, 1, 0.5), (23, "stopped", 9)],
    "killed": [*START, (10, "saved", 5, 1, 0.5), (13, "saved", 8, 1, 0.25), (20, "restored", 8), (22, "compiled", 8)],
    "from the start": [*START, (20, "started", 0), (22, "compiled", 0), (30, "saved", 5, 2, 1), (43, "stopped", 9)],
    "a commit that was not recorded": [*START, (10, "saved", 5, 1, 0.5), (20, "restored", 8), (22, "compiled", 8)],
    "twice": [*START, (10, "saved", 5, 1, 0.5), (20, "restored", 5), (25, "restored", 5), (27, "compiled", 5)],
    "again before a save": [*START, (10, "saved", 5, 1, 0), *AGAIN, (30, "restored", 5), (33, "compiled", 5)],
    "rolled back": [
        *START,
        (10, "saved", 5, 1, 0.5),
        (15, "saved", 8, 1, 2),
        (20, "rolled_back", 5),
        (40, "stopped", 9),
    ],
    "not continued": [*START, (10, "saved", 5, 1, 0.5), (20, "restored", 5), (24, "fault", 5)],
}
LOST = {"undisturbed": 0, "killed": 10, "from the start": 19, "a commit that was not recorded": 13, "twice": 18}
LOST |= {"rolled back": 11, "not continued": 15, "again before a save": 24}
HELD = {"undisturbed": 0.5, "killed": 0.5, "from the start": 1}


@pytest.mark.parametrize("name", HISTORIES)
def test_goodput_is_that_of_an_independent_reader(name, soak, tmp_path):
    rows = events(*HISTORIES[name])
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = soak.goodput(rows)
    assert figures == pytest.approx(read_goodput(tmp_path / "events.jsonl"), abs=1e-4)
    assert figures["faults_s"] == LOST[name] and figures["checkpoints_s"] == HELD.get(name, 0)


@pytest.mark.parametrize("mb_per_hour", [0.0, 40.0])
def test_slope_has_an_interval(mb_per_hour, soak):
    rng, lives = np.random.default_rng(0), []
    for level in (200.0, 260.0, 230.0):
        seconds = np.arange(0, 300, soak.SAMPLE_S)
        rss = level + mb_per_hour * seconds / 3600 + rng.normal(0, 0.1, len(seconds))
        lives.append(np.stack([seconds, rss, np.full(len(seconds), 20.0)], 1))
    row = soak.of_role(lives)
    found, lower, upper = row["rss_mb_per_hour"]
    assert lower <= mb_per_hour <= upper and upper - lower < 10 and abs(found - mb_per_hour) < 5
    assert row["open_files_per_hour"] == [0, 0, 0] and row["lives"] == row["long_lives"] == 3


def test_faults_follow_from_the_seed(soak):
    faults = soak.draw(1, 60, 4, 60)
    assert faults == soak.draw(1, 60, 4, 60) != soak.draw(2, 60, 4, 60)
    assert {fault.kind for fault in faults} == set(soak.DRAWN) and {fault.process for fault in faults} == {0, 1, 2, 3}
    assert [fault.seconds for fault in faults] == [60.0 * minute for minute in range(1, 61)]
    assert [fault.step for fault in soak.draw(1, 3, 4, 60, 12)] == [12, 24, 36]
    assert all(fault.process for fault in faults if fault.kind == "clock")


def test_lost_line_is_reported(soak, tmp_path):
    folder = tmp_path / "logs/attempt_1/p000"
    folder.mkdir(parents=True)
    for name, numbers in {"stdout": (1, 2), "stdout.4": (9, 10), "stdout.5": (11, 12)}.items():
        (folder / f"{name}.txt").write_text("".join(f"line {number} of step 1\n" for number in numbers))
    assert soak.check_logs(tmp_path) == {"rotated": 1, "bytes": 105, "wrong": []}
    (folder / "stdout.5.txt").write_text("line 12 of step 1\n")
    assert "a line is missing" in soak.check_logs(tmp_path)["wrong"][0]
    (folder / "stdout.6.txt").write_text("")
    assert "4 files, limit 3" in soak.check_logs(tmp_path)["wrong"][0]


@pytest.mark.processes
def test_short_soak_ends_bitwise_equal(soak, forks, tmp_path):
    arguments = ["--faults=1", "--every-steps=12", "--processes=2", "--store=local", f"--folder={tmp_path / 'soak'}"]
    settings = ["devices=cpu:2", "checkpoint.every_steps=5", "log.max_mb=0.002"]
    settings.append("optimizer={name: sgd, learning_rate: 0.01}")  # fewer arrays to save
    variables = {"SPMDKIT_COMPILE_CACHE": "off"}  # programs are cached by the fork server
    script = [str(SCRIPT), *arguments, "--seed=2", *settings]
    (ended,) = forks.run([Process(script, tmp_path, variables, forks=True)], 200)
    assert ended.code == 0, ended.output
    result = json.loads((tmp_path / "soak/soak.json").read_text())
    assert result["different"] == [] and result["lost_commits"] == [] and result["remaining_processes"] == 0
    assert [fault["kind"] for fault in result["faults"]] == [fault.kind for fault in soak.draw(2, 1, 2, 0)]
    assert {"launcher", "coordination service", "process 0", "process 1"} <= result["memory"].keys()
    ours = read_goodput(tmp_path / "soak/run/events.jsonl")
    assert {name: result[name] for name in ours} == pytest.approx(ours, abs=2e-3)
    assert result["faults_s"] > 0 and result["checkpoints_s"] > 0 and result["logs"]["rotated"]
