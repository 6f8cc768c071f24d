"""Before a run begins its step is weighed, on every process alike; its plan is written beside the run and is never its
end."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import pytest

from spmdkit.plan import document, fit_check
from spmdkit.plan.command import make_plan
from spmdkit.program import auto, memory
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.program import Program
from spmdkit.run.loop import train
from tests.support.plan_files import config, write


def events(run_dir):
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


# ---- the plan of a run
# -------------------------------------------------------------------------------------------------


def test_the_first_step_does_not_wait_for_the_plan_and_the_end_of_the_run_does(tmp_path, monkeypatch):
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
    assert "sent by a device in a step" in (tmp_path / "report.html").read_text()
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert [e["event"] for e in events(tmp_path)] == ["started", "running", "compiled", "compiled", "stopped"]


@pytest.mark.parametrize("error", [KeyError("no such\ncomputation"), SystemExit(3)])
def test_whatever_a_plan_raises_is_one_line_and_one_event_and_the_run_goes_on(error, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise error

    monkeypatch.setattr(document, "plan_program", broken)
    interval = sys.getswitchinterval()
    run = train(config(run_dir=str(tmp_path), log={"progress": "plain"})).run
    assert run.step == 2
    (failed,) = (e for e in events(tmp_path) if e["event"] == "plan_failed")
    assert failed["error"].startswith(type(error).__name__) and "\n" not in failed["error"]
    assert capsys.readouterr().out.count("the plan of this run could not be written") == 1
    assert not (tmp_path / "plan.json").exists()
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_plan_that_hangs_holds_nothing_up_for_ever(tmp_path, monkeypatch):
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


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_step_that_the_compiler_refuses_for_its_size_does_not_fit_anywhere():
    def refused():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 20.50G of 15.75G hbm.")

    given = memory.Held({"parameters": 1000, "inputs": 10}, {})
    found = memory.step_bytes(refused, given, "tpu")
    assert found.temp_bytes == int(20.5 * 2**30) and found.peak_bytes == found.temp_bytes + 1010
    assert not found.fits(None) and not found.fits(2**50)

    def broken():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        memory.step_bytes(broken, given, "tpu")


HOST = {"offload": ["optimizer"], "mesh": {"data": 8}, "batch_size": 4096, "task_args": {"layers": 16}}


@pytest.fixture(scope="module")
def planned():
    """Bytes that a plan says of the step with the optimizer's state on the host."""
    return make_plan(config(**HOST))["memory"]


def test_auto_the_plan_and_the_start_count_the_same_bytes(planned):
    """What lives on the host counts nowhere: XLA's CPU backend says that it did."""
    asked = config(**HOST, microbatches="auto")
    found = open_program(asked, task_of(asked), jax.devices(), planned["peak_bytes"])
    assert found.step_bytes.peak_bytes == planned["peak_bytes"] and found.config.microbatches == 1
    assert found.step_bytes.argument_bytes == found.held.device_bytes and found.held.host_bytes > 0
    assert found.step_bytes.fits(planned["peak_bytes"]) and not found.step_bytes.fits(planned["peak_bytes"] - 1)


def test_auto_traces_the_step_again_and_builds_one_program(monkeypatch, planned):
    made, asked = [], config(**HOST, microbatches="auto", remat="auto")
    init = Program.__init__
    monkeypatch.setattr(Program, "__init__", lambda self, *args: made.append(args[0]) or init(self, *args))
    said = []
    found = open_program(asked, task_of(asked), jax.devices(), planned["peak_bytes"] - 1, said.append)
    assert len(made) == 1
    assert [(line.split(": ")[1], line.rsplit(", ", 1)[1]) for line in said] == [
        ("microbatches 1, remat none", "does not fit"),
        ("microbatches 64, remat none", "fits"),
        ("microbatches 8, remat none", "fits"),
        ("microbatches 2, remat none", "fits"),
    ]
    assert all(" GiB" in line or " MiB" in line for line in said)
    assert (found.config.microbatches, found.config.remat) == (2, "none")
    alone = Program(config(**HOST, microbatches=2), task_of(asked), jax.devices())
    assert found.form == alone.form and found.layout == alone.layout
    assert found.step_bytes == alone.step_bytes
    state, batch = found.init(), next(iter(found.batches()))[1]
    assert float(found.step(state, batch)[1]["loss"]) == float(alone.step(alone.init(), batch)[1]["loss"])


def test_every_choice_of_auto_is_in_order():
    asked = config(batch_size=64, microbatches="auto", remat="auto")
    assert auto.choices(asked, 8) == [
        [{"microbatches": m, "remat": remat} for m in (1, 2, 4, 8)] for remat in ("none", "dots", "full")
    ]
    assert auto.choices(config(batch_size=64, microbatches="auto"), 32) == [[{"microbatches": 1}, {"microbatches": 2}]]


# ---- processes ----


PROCESS = """
import os, sys, time
from spmdkit.program import memory
from spmdkit.cluster import detect_cluster, join
from spmdkit.config import load_config
from spmdkit.faults import run_process
from spmdkit.run.loop import train
me = int(os.environ["SPMDKIT_PROCESS_ID"])
def main():
    loaded = load_config(sys.argv[1])
    cluster = join(detect_cluster(os.environ), loaded.devices)
    if me == 0:  # only process 0 finds that the step does not fit
        memory.StepBytes.fits = lambda self, limit: print("refused at", time.time(), file=sys.stderr)
    train(loaded, cluster)
sys.exit(run_process(main))
"""


@pytest.mark.processes
def test_a_refusal_on_process_0_ends_every_process_with_78_within_seconds(tmp_path):
    """Without a launcher, which would end the others by itself."""
    path = write(tmp_path, devices="cpu:2", mesh={"data": 2}, run_dir=str(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    running = []
    for process in range(2):
        folders = [Path(__file__).parents[2], Path(__file__).parent]
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "SPMDKIT_COORDINATOR": coordinator,
            "SPMDKIT_NUM_PROCESSES": "2",
            "SPMDKIT_PROCESS_ID": str(process),
        }
        command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(path)]
        running.append(subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True))
    ended = []
    try:
        for popen in running:
            said = popen.communicate(timeout=90)[1]
            ended.append((popen.returncode, said))
        (refused_at,) = re.findall(r"refused at (\S+)", ended[0][1])
        assert time.time() - float(refused_at) < 5, "every process has ended by then"
    finally:
        for popen in running:
            popen.kill()
            popen.wait()
    assert [code for code, _ in ended] == [78, 78], ended
    assert all("train does not begin: a step needs" in said for _, said in ended), ended
