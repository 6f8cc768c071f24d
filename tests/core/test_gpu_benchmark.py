"""benchmarks/gpu.py on a CPU: order, deadline, the next call, and the line of JSON."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.environment import environment_of_a_user

ROOT = Path(__file__).parents[2]
MEASURED = {"tokens/s": 100.0, "MFU": 0.61, "loss": 3.0}


@pytest.fixture
def gpu(monkeypatch):
    for folder in (ROOT / "benchmarks", ROOT / "benchmarks" / "peers"):
        monkeypatch.syspath_prepend(folder)
    for module in ("gpu", "models", "results", "worker"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    import gpu

    return gpu


class Calls:
    """Calls of the benchmark with rows in memory; `outcomes`: item -> row or exception, default `MEASURED`."""

    def __init__(self, gpu):
        self.gpu, self.rows, self.saved, self.begun = gpu, [], [], []

    def __call__(self, outcomes, seconds=1000.0):
        def run(item, left):
            self.begun.append(item)
            outcome = outcomes.get(item, MEASURED)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        self.begun = []
        save = lambda rows: self.saved.append(json.dumps(rows))
        return self.gpu.measure(self.gpu.items_of(False), self.rows, run, save, time.monotonic() + seconds)


def test_items_run_in_order_and_each_is_saved(gpu):
    calls = Calls(gpu)
    assert calls({}) == []
    assert calls.begun == gpu.items_of(False) and calls.begun[0] == "tests" and calls.begun[3] == "spmdkit/gpt_1300m"
    assert [len(json.loads(text)) for text in calls.saved] == [1, 2, 3, 4, 5, 6, 7]
    assert calls({}) == [] and calls.begun == []  # all are measured


def test_a_stopped_call_continues_with_the_same_item(gpu, monkeypatch):
    calls = Calls(gpu)
    clock = iter([0, 0, 0, 0, 300, 300, 300])  # the third item begins when 300 of 480 s are over
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock, 300))
    left = calls({"spmdkit/gpt_350m": gpu.Stopped()}, seconds=480)
    assert calls.begun == ["tests", "spmdkit/gpt_124m", "spmdkit/gpt_350m"] and left[0] == "spmdkit/gpt_350m"
    assert calls({}, seconds=480) == [] and calls.begun == left


def test_no_item_begins_after_the_deadline(gpu):
    calls = Calls(gpu)
    assert calls({}, seconds=-1.0) == gpu.items_of(False) and calls.begun == []


def test_an_item_that_needs_more_than_a_call_does_not_block_the_others(gpu):
    calls = Calls(gpu)
    assert calls({"tests": gpu.Stopped(), "torch/gpt_124m": {"status": "failed: memory"}}) == [
        "tests",
        "torch/gpt_124m",
    ]
    assert calls.begun == gpu.items_of(False)
    assert [row["status"] for row in calls.rows if row["item"] in ("tests", "torch/gpt_124m")] == [
        "no result in 1000 s",
        "failed: memory",
    ]
    assert calls({}) == [] and calls.begun == ["tests", "torch/gpt_124m"]


def test_goals_need_the_rate_of_torch(gpu):
    calls = Calls(gpu)
    theirs = {"tokens/s": 98.0, "loss": 3.01}
    calls({f"torch/{size}": theirs for size in gpu.SIZES[1:]} | {"torch/gpt_124m": {"tokens/s": 50.0, "loss": 4.0}})
    rows = {row["item"]: row for row in calls.rows}
    assert rows["spmdkit/gpt_1300m"]["goals"] == "MFU 0.60 met, tokens/s, of torch 1.05 missed"
    assert rows["spmdkit/gpt_350m"]["goals"] == "tokens/s, of torch 1.05 missed"
    assert rows["spmdkit/gpt_124m"]["comparable"] == "losses differ by 33.3%"


def test_a_process_is_killed_with_its_children(gpu, tmp_path):
    path = tmp_path / "pid"
    script = f"sleep 1000 < /dev/null > /dev/null 2>&1 & echo $! > {path}; wait"
    with pytest.raises(gpu.Stopped):
        gpu.execute(["sh", "-c", script], "", 1, {"PATH": "/usr/bin:/bin"})
    while is_running(path.read_text().strip()):  # the signal has been sent
        time.sleep(0.01)
    assert gpu.execute(["cat"], "a\nb\n", 60, {"PATH": "/usr/bin:/bin"}) == (0, "a\nb\n")


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_model_sizes(gpu):
    """The products of a token are 6 for each parameter of a matrix, and those of attention."""
    models = sys.modules["models"]
    tiny = models.GPU_MODELS["gpt_tiny"]
    matrices = sum(w.size for name, w in models.parameters(tiny).items() if w.ndim == 2 and name != "embed")
    assert tiny.flops == tiny.tokens * (6 * matrices + 6 * tiny.layers * tiny.context * tiny.width)
    for name, millions in (("gpt_124m", 124), ("gpt_350m", 355), ("gpt_1300m", 1_313)):
        model = models.GPU_MODELS[name]
        num = 12 * model.layers * model.width**2 + model.width * model.vocab  # with one matrix for embed and head
        assert abs(num / 1e6 / millions - 1) < 0.01, (name, num)


@pytest.mark.processes
def test_the_form_on_a_cpu(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--cpu", "--folder", str(tmp_path), "--only", "spmdkit/gpt_tiny"]
    options = {"cwd": ROOT, "env": environment_of_a_user(), "capture_output": True, "text": True, "timeout": 200}
    call = lambda *more: subprocess.run([*command, *more], **options)
    stopped = json.loads(call("--seconds", "0").stdout)
    assert (stopped["rows"], stopped["left"]) == ([], ["spmdkit/gpt_tiny"])
    done = call("--seconds", "150")
    line = json.loads(done.stdout.splitlines()[-1])
    (row,) = line["rows"]
    assert (row["status"], line["left"], line["device"]) == ("ok", [], "CPU"), done.stderr
    assert (
        row["tokens/s"] > 0 and row["peak of the plan, GiB"] > 0 and row["step of the plan, ms"] > 0 and row["MFU"] > 0
    )
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved["rows"] == [row] and saved["note"] == "Device: CPU." and saved["command"] == "make gpu"
    assert json.loads(call().stdout)["rows"] == [row]  # not measured again
