"""When a drill strikes, and what it makes of odd names, leaves and ends: without a run."""

import dataclasses
import json
import random
import re
import resource
import signal
import subprocess
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from spmdkit import cli
from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.faults.injection.fault import DISK_FULL_BYTES, KINDS, Fault
from spmdkit.faults.injection.inject import FaultInjector, _with_bit_flip, _with_nan
from spmdkit.foundation.constants import DRILL_FILE
from spmdkit.foundation.phase import Phase
from spmdkit.launch.local import _newest
from spmdkit.launch.logs import Logs
from spmdkit.metrics.events import utc_time
from spmdkit.tools.drill import command, compare, corrupt, driver, job, timing
from spmdkit.tools.drill.driver import Driver
from spmdkit.tools.drill.network import Network
from spmdkit.tools.drill.timing import Moment, Pace


@pytest.fixture
def child():
    """A process of a job, as the launcher knows it, that has begun step 3."""
    popen = subprocess.Popen(["sleep", "600"])
    step = SimpleNamespace(read=lambda: json.dumps({"step": 3}).encode())
    fields = {"last_beat": {"phase": "step"}, "popen": popen, "step": step}
    yield SimpleNamespace(process=0, exit=None, is_removed=False, is_standby=False, **fields)
    popen.kill()
    popen.wait()


def room(child):
    return resource.prlimit(child.popen.pid, resource.RLIMIT_FSIZE)[0]


def test_disk_is_full_once_the_save_has_begun(child, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "draw", lambda *_: Moment("save", 0.0, 2))
    monkeypatch.setattr(driver, "step_of", lambda raw: 3)
    drill = Driver(tmp_path, 1, [Fault("disk-full")], pace=Pace(1.0, 0.1, 5), steps=60)
    variables, _ = drill.process_env(0)
    injector = FaultInjector(variables[DRILL_FILE])
    for step in (1, 2):
        drill.on_poll([child])
        injector.before_step(step)
        injector.after_save() if step == 1 else None
    drill.on_poll([child])
    assert drill.injections == [] and room(child) != DISK_FULL_BYTES, "the second save has not begun"
    injector.after_save()
    drill.on_poll([child])
    (injection,) = drill.injections
    assert (injection.fault.kind, injection.process, injection.failed) == ("disk-full", 0, "")
    assert room(child) == DISK_FULL_BYTES
    drill.close()


def test_death_in_process_is_recovered_within_one_start(tmp_path):
    steps = {}

    def started(drill, process):
        note = drill.process_env(process)[0][DRILL_FILE]
        step = SimpleNamespace(read=lambda: b"%d" % steps[note] if note in steps else b"")
        child = {"process": process, "exit": None, "last_beat": None, "is_removed": False, "is_standby": process < 0}
        return SimpleNamespace(**child, step=step, note=note)

    clock = iter(range(100, 200))
    drill = Driver(tmp_path, 2, [Fault("kill", 1, 5), Fault("term", 1, 9)], clock=lambda: next(clock))
    children = [started(drill, 0), started(drill, 1), started(drill, -1)]
    drill.on_poll(children)
    injector = FaultInjector(children[1].note)
    injector._send_signal = lambda number, which: injector._write_result(number)
    injector.before_step(5)
    steps |= {children[0].note: 5, children[1].note: 5}
    drill.on_poll(children)
    children[1].exit, children[1].is_removed = SimpleNamespace(code=137), True
    children[2].process, children[2].is_standby = 1, False  # the standby takes its place
    drill.on_poll(children)
    (injection,) = drill.injections
    assert injection.in_process and injection.detected_by == "the exit of process 1" and injection.recovered is None
    steps |= {children[0].note: 6, children[2].note: 6}
    drill.on_poll(children)
    assert injection.recovered is not None and len(drill.attempts) == 1
    second = FaultInjector(children[2].note)
    second._send_signal = lambda number, which: second._write_result(number)
    second.before_step(9)
    drill.on_poll(children)
    assert [(injection.fault.kind, injection.reached) for injection in drill.injections] == [("kill", 5), ("term", 9)]
    drill.close()


def test_injected_fault_is_not_repeated_after_membership_change(child, tmp_path):
    drill = Driver(tmp_path, 1, [Fault("slow", 0, 2)])
    variables, _ = drill.process_env(0)
    drill.on_poll([child])
    first = FaultInjector(variables[DRILL_FILE])
    first.before_step(2)
    again = FaultInjector(variables[DRILL_FILE])
    again.before_step(2)
    assert first._slow_until > 0 and again._slow_until == 0
    drill.close()


def test_fault_is_injected_in_its_phase(child, tmp_path, monkeypatch):
    drill = Driver(tmp_path, 1, [Fault("disk-full", 0, phase="evaluation", from_step=4)])
    variables, _ = drill.process_env(0)
    drill.on_poll([child])
    injector = FaultInjector(variables[DRILL_FILE])
    for name, step in (("step", 4), ("evaluation", 3), ("restore", 5)):
        injector.enter_phase(Phase(name, "", step, 0.0, 1))
        drill.on_poll([child])
        assert drill.injections == [], name
    injector.enter_phase(Phase("evaluation", "reading data", 4, 0.0, 1))
    drill.on_poll([child])
    (injection,) = drill.injections
    assert (injection.reached, injection.failed) == (4, "") and room(child) == DISK_FULL_BYTES
    drill.close()


def test_memory_limit_is_the_current_size(child, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "step_of", lambda raw: 3)
    drill = Driver(tmp_path, 1, [Fault("memory", 0, 3)])
    drill.process_env(0)
    drill.on_poll([child])
    drill.on_poll([child])
    drill.on_poll([child])
    assert 0 < resource.prlimit(child.popen.pid, resource.RLIMIT_AS)[0] < 1 << 30
    drill.close()


def test_store_is_down_until_that_is_detected(child, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "step_of", lambda raw: 3)
    calls = []
    store = SimpleNamespace(take_down=lambda: calls.append("down") or "", restore=lambda: calls.append("up"))
    drill = Driver(tmp_path, 1, [Fault("object-store", 0, 3)], store=store)
    drill.process_env(0)
    for _ in range(3):
        drill.on_poll([child])
    assert calls == ["down"]
    event = {"event": "save_failed", "time": utc_time(time.time()), "process": 0, "step": 4}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    drill.on_poll([child])
    assert calls == ["down", "up"] and drill.injections[0].detected_by == "the event 'save_failed'"
    drill.close()


def test_drill_kills_the_coordination_service(child, tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(driver, "step_of", lambda raw: 3)
    monkeypatch.setattr(driver, "send", lambda *signal: killed.append(signal))
    drill = Driver(tmp_path, 1, [Fault("service", 0, 3)])
    drill.process_env(0)
    drill.on_service(4711)
    for _ in range(3):
        drill.on_poll([child])
    assert killed == [(4711, signal.SIGKILL)]
    drill.close()


@pytest.mark.parametrize(
    ("text", "part"), [("truncate:1@9", "while no process runs"), ("partition:1@9", "on one host")]
)
def test_faults_impossible_in_process_are_refused(text, part, tmp_path):
    (tmp_path / "run.yaml").write_text("task: t.py:task\nsteps: 20\nbatch_size: 4\nelastic: {in_process: true}\n")
    request = job.DrillRequest(tmp_path / "run.yaml", [], [text])
    with pytest.raises(ConfigError) as error:
        command.run_drill(request)
    assert f"--fault {text}" in str(error.value) and part in str(error.value)
    assert "elastic.in_process=false" in str(error.value)


def test_store_and_network_faults_need_two_drills(tmp_path):
    (tmp_path / "run.yaml").write_text("task: t.py:task\nsteps: 20\nbatch_size: 4\n")
    with pytest.raises(ConfigError, match=r"--fault delay:1@9 and --fault object-store.* Run two drills"):
        command.run_drill(job.DrillRequest(tmp_path / "run.yaml", [], ["object-store:0@3", "delay:1@9"]))


def test_the_help_names_every_kind_of_fault(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        raise SystemExit(cli.main(["drill", "--help"]))
    words = set(re.findall(r"[a-z-]+", capsys.readouterr().out))
    assert words >= set(KINDS)


ODD = ("²", "٣", "01", "-1", "1e3")
"""Names of folders that are no steps: the first two are digits, and numbers, to Python's `isdigit`."""


def test_folders_that_are_no_steps_are_ignored(tmp_path, monkeypatch):
    for name in (*ODD, "7"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run_drill" / name).mkdir(parents=True)
        (tmp_path / "run/logs" / f"attempt_{name}").mkdir(parents=True)
        (tmp_path / "run/checkpoints" / name / "record.json").touch()
    assert corrupt.newest(tmp_path / "run/checkpoints") == 7
    config = SimpleNamespace(resolved_run_dir=lambda: tmp_path / "run")
    assert command._new_folder(config).name == "8"
    logs = Logs()
    logs.open(tmp_path / "run", 1)
    assert logs.folder.name == "attempt_8"
    assert _newest(logs.folder) == 7


@dataclasses.dataclass
class Batch:
    examples: dict


@dataclasses.dataclass
class TrainState:
    params: dict

    def replace(self, params):
        return TrainState(params)


def test_nan_needs_a_leaf_with_float_rows():
    _, corrupted = _with_nan(None, Batch({"a": jnp.float32(1.0), "b": jnp.ones((2, 3))}), random.Random(0))
    assert np.isnan(corrupted.examples["b"][0]).all() and corrupted.examples["a"] == 1.0
    with pytest.raises(ValueError, match="no leaf of floating-point rows"):
        _with_nan(None, Batch({"a": jnp.float32(1.0), "b": jnp.ones((0, 3)), "c": jnp.arange(3)}), random.Random(0))


def test_bit_flip_changes_one_bit_of_a_parameter():
    state = TrainState({"w": jnp.ones((4, 4)), "b": jnp.ones(2)})
    flipped, _ = _with_bit_flip(state, None, random.Random(0))
    assert (flipped.params["b"] == 1).all() and np.abs(flipped.params["w"] - 1).max() < 1, "a bit of the fraction"
    before, after = (np.unpackbits(np.asarray(x.params["w"]).view(np.uint8)) for x in (state, flipped))
    assert (before != after).sum() == 1


@pytest.mark.parametrize("kind", ["truncate", "corrupt"])
def test_damage_changes_the_newest_checkpoint(kind, tmp_path):
    for step in (5, 10):
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/{step}/data").write_bytes(bytes(100))
        (tmp_path / f"checkpoints/{step}/record.json").touch()
    assert corrupt.damage(tmp_path / "checkpoints", kind, random.Random(0)) == "10/data"
    content = (tmp_path / "checkpoints/10/data").read_bytes()
    assert content == bytes(50) if kind == "truncate" else sum(map(int.bit_count, content)) == 1 and len(content) == 100
    assert (tmp_path / "checkpoints/5/data").read_bytes() == bytes(100)


def test_exited_switch_is_reported_by_the_fault():
    switch = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    switch.wait()
    network = Network([0, 0, 0], switch)
    assert "the switch between the hosts has exited" in network.inject("partition", 0)
    network.restore()
    switch.stdin.close()


@pytest.mark.parametrize(
    ("ours", "part"),
    [
        ({"w": np.zeros((2, 3), np.float32)}, "w is float32[2, 3], without faults float32[3, 2]"),
        ({"w": np.zeros((3, 2), np.int32)}, "w is int32[3, 2], without faults float32[3, 2]"),
        ({"w": np.ones((3, 2), np.float32)}, "w differs by"),
        ({"w": np.zeros((3, 2), np.float32)}, None),
    ],
)
def test_leaves_of_other_shapes_or_dtypes_differ(ours, part, tmp_path, monkeypatch):
    states = {"clean": {"w": np.zeros((3, 2), np.float32)}, "disturbed": ours}
    monkeypatch.setattr(compare, "newest", lambda run: 5)
    monkeypatch.setattr(compare, "read_state", lambda folder, step: states[folder.parent.name])
    found = compare.different_leaf(tmp_path / "clean", tmp_path / "disturbed")
    assert found == "" if part is None else part in found


def test_drill_writes_nothing_into_the_bucket(tmp_path, monkeypatch):
    config = tmp_path / "run.yaml"
    config.write_text(
        "task: t.py:task\nsteps: 9\nbatch_size: 8\ncheckpoint: {every_steps: 2, directory: gs://bucket-one/run}\n"
    )
    started = []
    monkeypatch.setattr(job, "launch", lambda command, *_, **__: started.append(command) or 5)
    request = job.DrillRequest(config=config, overrides=[], faults=["kill:0@3"], num_processes=1)
    assert command.run_drill(request) == 5
    (words,) = started
    overrides = words[words.index(str(config)) + 1 :]
    loaded = load_config(config, overrides)
    assert loaded.checkpoint.directory is None and loaded.checkpoint.every_steps == 2


def test_drill_fails_without_its_faults_or_results():
    drill = SimpleNamespace(injections=[], num_requested=1, lost_commits=[(20, 10)])
    why = command._failures(drill, 0, "w differs", "")
    assert why[0].startswith("1 of 1 faults were not injected")
    assert why[1:] == [
        "step 20 was committed, and the run resumed from step 10",
        "the state is not bitwise equal to the run without faults: w differs",
    ]
    drill = SimpleNamespace(injections=[], num_requested=0, lost_commits=[])
    assert command._failures(drill, 0, "", "") == []
    assert command._failures(drill, 77, "x", "x")[0].startswith("the run exited with 77")
