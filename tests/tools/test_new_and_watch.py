"""`spmdkit new` writes a project that runs; `spmdkit watch` shows a run and only reads its files."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from spmdkit import cli
from spmdkit.errors import ConfigError
from spmdkit.foundation import run_status
from spmdkit.tools.new import write_project
from spmdkit.tools.watch import frame, watch
from tests.support.command_line import alone as alone


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_project_runs(folder, capfd, alone, monkeypatch):
    assert cli.main(["new", "digits"]) == 0
    assert capfd.readouterr().out == "spmdkit train digits/train.yaml\npython -m pytest digits/test_task.py\n"
    assert sorted(path.name for path in (folder / "digits").iterdir()) == ["task.py", "test_task.py", "train.yaml"]
    short = ["epochs=null", "steps=3", "devices=cpu:8", "mesh={data: -1}", "eval.every_steps=3"]
    assert cli.main(["train", "digits/train.yaml", *short]) == 0
    assert (folder / "digits/runs/train/report.html").is_file()
    monkeypatch.syspath_prepend(str(folder / "digits"))
    monkeypatch.delitem(sys.modules, "task", raising=False)
    spec = importlib.util.spec_from_file_location("test_of_the_new_task", folder / "digits/test_task.py")
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    tests.test_the_loss_is_the_mean_squared_error()
    tests.test_training_lowers_the_loss(folder)
    sys.modules.pop("task", None)
    with pytest.raises(ConfigError, match="digits exists"):
        write_project("digits")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b"])
def test_a_bad_name_is_rejected(name, folder):
    with pytest.raises(ConfigError, match="a name has letters, digits"):
        write_project(name)
    assert not list(folder.iterdir())


@pytest.fixture
def run_dir(folder):
    """The files of a run at step 40 of 100."""
    directory = folder / "runs" / "first"
    directory.mkdir(parents=True)
    records = [
        {"step": n, "loss": 4.0 / n, "accuracy": n / 100, "examples_per_s": 640.0, "step_time_s": 0.5}
        for n in (1, 10, 20, 30, 40)
    ]
    records.insert(3, {"step": 20, "split": "eval", "loss": 0.25, "accuracy": "NaN"})
    _lines(directory / "metrics.jsonl", records)
    (directory / "config.yaml").write_text("steps: 100\n")
    _events(directory)
    return directory


def _lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _events(directory, *more):
    started = {"event": "started", "time": "2026-11-27T12:00:01.000Z", "step": 0}
    _lines(
        directory / "events.jsonl",
        [started, {"event": "running", **run_status.running(0)}, {"event": "saved", "step": 30}, *more],
    )


def test_a_running_run_is_shown(run_dir):
    text, is_active = frame(run_dir)
    lines = text.splitlines()
    assert is_active and lines[0].endswith(f"runs/first: running, process {os.getpid()} on {os.uname().nodename}")
    assert lines[1].startswith("step 40 of 100  " + "█" * 16 + "·" * 24) and lines[1].endswith(
        "40%  640 examples/s  left 30s"
    )
    assert lines[2] == "loss █▁▁▁▁  4.0000 to 0.1000"
    assert lines[3] == "step 40:  loss 0.1000  accuracy 0.4000" and lines[4].startswith(
        "step 20 eval:  loss 0.2500  accuracy"
    )
    assert lines[5:] == ["saved: step 30", "  12:00:01 started at step 0"]


ENDS = {
    "finished": ({"event": "stopped", "step": 100, "code": 0}, ": finished\n"),
    "failed": ({"event": "stopped", "step": 40, "code": 74, "error": "disk"}, ": stopped: disk\n"),
    "fault": (
        {"event": "fault", "step": 40, "error": "NonFiniteError: the loss\nmore"},
        ": fault: NonFiniteError: the loss\n",
    ),
    "killed": (
        {"event": "running", "step": 40, "pid": 2**22 + 1, "host": os.uname().nodename, "born": 1},
        ": ended without an exit event",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_run_ends_watch(name, run_dir, capsys):
    event, words = ENDS[name]
    _events(run_dir, event)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run_dir.rglob("*")}
    watch(run_dir, every_s=math.inf)
    out = capsys.readouterr().out
    assert words in out and "\x1b" not in out
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run_dir.rglob("*")} == before


def test_a_process_that_nobody_waits_for_has_ended(run_dir):
    """As one that was killed in a container, where process 1 may not read the exit statuses."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        born = run_status._start_ticks(process.pid)
        _events(
            run_dir, {"event": "running", "step": 40, "pid": process.pid, "host": os.uname().nodename, "born": born}
        )
        assert run_status.unfinished(run_dir).alive
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert not run_status.unfinished(run_dir).alive


def test_a_run_elsewhere_may_be_active(run_dir):
    _events(run_dir, {"event": "running", "step": 0, "pid": 7, "host": "another-host", "born": 1})
    text, is_active = frame(run_dir)
    assert is_active and "running or ended, process 7 on another-host" in text


def test_a_run_before_its_first_line_is_shown(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "config.yaml").write_text("steps: [\n")
    assert frame(run_dir)[0].splitlines()[1] == "step 0"
    with pytest.raises(ConfigError, match=r"no events\.jsonl there"):
        watch(run_dir.parent)
