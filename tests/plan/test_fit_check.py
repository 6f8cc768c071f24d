"""Before a run begins its step is compiled and checked, on every process alike. The plan of a run never ends it."""

import json
import re
import sys
import threading
from types import SimpleNamespace

import jax
import pytest

from spmdkit.errors import ConfigError, OutOfMemoryError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan import document, fit_check
from spmdkit.plan.command import make_plan
from spmdkit.program import memory
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.program import Program
from spmdkit.run.loop import train
from tests.support.plan_files import config

pytestmark = pytest.mark.locations


def events(run_dir):
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_only_the_end_waits_for_the_plan(tmp_path, monkeypatch):
    stepped = threading.Event()
    step, plan_program = Program.step, document.plan_program

    def stepping(self, *args):
        out = step(self, *args)
        stepped.set()
        return out

    def planning(*args):
        assert stepped.wait(10), "the run waits for its plan"
        return plan_program(*args)

    monkeypatch.setattr(Program, "step", stepping)
    monkeypatch.setattr(document, "plan_program", planning)
    train(config(run_dir=str(tmp_path)))
    assert json.loads((tmp_path / "plan.json").read_text())["num_devices"] == 8
    assert "bytes sent per device and step" in (tmp_path / "report.html").read_text()
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert [e["event"] for e in events(tmp_path)] == ["started", "running", "compiled", "compiled", "stopped"]


def test_a_failed_plan_is_one_line_and_event(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise SystemExit("no such\ncomputation")

    monkeypatch.setattr(document, "plan_program", broken)
    interval = sys.getswitchinterval()
    assert train(config(run_dir=str(tmp_path), log={"progress": "plain"})).run.step == 2
    (failed,) = (e for e in events(tmp_path) if e["event"] == "plan_failed")
    assert failed["error"] == "SystemExit: no such"
    assert capsys.readouterr().out.count("the plan of this run could not be written") == 1
    assert not (tmp_path / "plan.json").exists()
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_hung_plan_does_not_block_the_run(tmp_path, monkeypatch):
    hangs, plan_program = threading.Event(), document.plan_program

    def planning(*args):
        assert hangs.wait(60)
        return plan_program(*args)

    monkeypatch.setattr(document, "plan_program", planning)
    monkeypatch.setattr(fit_check, "PLAN_CLOSE_S", 0.1)
    assert train(config(run_dir=str(tmp_path))).run.step == 2
    assert not (tmp_path / "plan.json").exists()
    hangs.set()
    for thread in [t for t in threading.enumerate() if t.name == "spmdkit plan"]:
        thread.join(60)
    assert json.loads((tmp_path / "plan.json").read_text())["num_devices"] == 8, "late, and whole"
    assert "plan_failed" not in [e["event"] for e in events(tmp_path)]


def test_a_step_refused_for_its_size_fits_nowhere():
    def refused():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 20.50G of 15.75G hbm.")

    given = memory.InputBytes({"parameters": 1000, "inputs": 10}, {})
    found = memory.step_bytes(refused, given, "tpu")
    assert found.temp_bytes == int(20.5 * 2**30) and found.peak_bytes == found.temp_bytes + 1010
    assert not found.fits(None) and not found.fits(2**50)

    def broken():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        memory.step_bytes(broken, given, "tpu")


def test_plan_and_auto_count_the_same_bytes():
    """What lives on the host counts nowhere: XLA's CPU backend counts it."""
    settings = {"offload": ["optimizer"], "mesh": {"data": 8}}
    peak = make_plan(config(**settings))["memory"]["peak_bytes"]
    requested = config(**settings, microbatches="auto")
    found = open_program(requested, task_of(requested), jax.devices(), peak)
    assert found.step_bytes.peak_bytes == peak and found.config.microbatches == 1
    assert found.step_bytes.argument_bytes == found.input_bytes.device_bytes and found.input_bytes.host_bytes > 0
    assert found.step_bytes.fits(peak) and not found.step_bytes.fits(peak - 1)


def test_a_problem_of_another_process_ends_this_one(tmp_path):
    program = open_program(config(), task_of(config()), jax.devices())
    cluster = SimpleNamespace(first_problem=lambda name, check: check() or f"{name} of process 3", num_processes=4)
    with pytest.raises(ConfigError, match="state of process 3"):
        fit_check.check_state(program, cluster, None)
    with pytest.raises(ConfigError, match=r"memory of process 3 spmdkit plan CONFIG shows"):
        fit_check.check_start(program, cluster, tmp_path, None)


def test_exhausted_memory_of_a_run_lists_the_largest_buffers(tmp_path, monkeypatch):
    step = Program.step

    def exhausted(self, state, batch):
        if int(state.step):
            raise jax.errors.JaxRuntimeError("INTERNAL: Failed to allocate 98697216 bytes for new constant")
        return step(self, state, batch)

    monkeypatch.setattr(Program, "step", exhausted)
    settings = config(run_dir=str(tmp_path), mesh={"data": 8}, batch_size=4096)
    with pytest.raises(OutOfMemoryError) as caught:
        train(settings)
    message, code = str(caught.value), caught.value.exit_code
    assert code == 70 and message.startswith("out of memory: 94.1 MiB more are needed (JaxRuntimeError: INTERNAL: F")
    needed = re.search(r"A training step needs ([\d.]+ [KM]iB) of each device: (\w+ .*)\. The largest", message)
    assert needed and needed[1] == format_bytes(make_plan(settings)["memory"]["peak_bytes"])
    assert re.search(r"^  [\d.]+ [KM]iB f32\[.*\]  \S+\.py:\d+  \S", message, re.M), message
    assert re.search(r"\nTry microbatches: \d \(", message) and len(message.splitlines()) <= 7
    assert [e["code"] for e in events(tmp_path) if e["event"] == "fault"] == [70]
