"""When a drill strikes, and what it makes of odd names, leaves and ends: without a run."""

import dataclasses
import json
import random
import re
import resource
import subprocess
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from spmdkit import cli
from spmdkit.errors import ConfigError
from spmdkit.faults.injection.fault import KINDS, Fault
from spmdkit.faults.injection.inject import Inside, _with_nan
from spmdkit.faults.injection.protocol import FULL_BYTES
from spmdkit.foundation.constants import DRILL_FILE
from spmdkit.launch.local import _newest
from spmdkit.launch.logs import Logs
from spmdkit.tools.drill import command, compare, corrupt, driver, timing
from spmdkit.tools.drill.driver import Driver
from spmdkit.tools.drill.network import Network
from spmdkit.tools.drill.timing import Moment, Pace


@pytest.fixture
def child():
    """A process of a job, as the launcher knows it, that has begun step 3."""
    popen = subprocess.Popen(["sleep", "600"])
    step = SimpleNamespace(read=lambda: json.dumps({"step": 3}).encode())
    told = {"said": {"phase": "step"}, "popen": popen, "step": step}
    yield SimpleNamespace(process=0, exit=None, mourned=False, in_waiting=False, **told)
    popen.kill()
    popen.wait()


def room(child):
    return resource.prlimit(child.popen.pid, resource.RLIMIT_FSIZE)[0]


def test_a_disk_that_is_to_be_full_in_a_save_is_full_once_a_save_has_begun(child, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "draw", lambda *_: Moment("save", 0.0, 2))
    monkeypatch.setattr(driver, "step_of", lambda raw: 3)
    drill = Driver(tmp_path, 1, [Fault("disk-full")], pace=Pace(1.0, 0.1, 5), steps=60)
    told, _ = drill.given(0)
    inside = Inside(told[DRILL_FILE])
    for step in (1, 2):
        drill.look([child])
        inside.before_step(step)
        inside.after_save() if step == 1 else None
    drill.look([child])
    assert drill.injections == [] and room(child) != FULL_BYTES, "the second save has not begun"
    inside.after_save()
    drill.look([child])
    (injection,) = drill.injections
    assert (injection.fault.kind, injection.process, injection.failed) == ("disk-full", 0, "") and room(
        child
    ) == FULL_BYTES
    drill.close()


def test_a_death_without_which_the_others_go_on_is_a_fault_of_the_same_start_and_the_next_is_told_to_who_came(tmp_path):
    steps = {}

    def started(drill, process):
        note = drill.given(process)[0][DRILL_FILE]
        step = SimpleNamespace(read=lambda: b"%d" % steps[note] if note in steps else b"")
        child = {"process": process, "exit": None, "said": None, "mourned": False, "in_waiting": process < 0}
        return SimpleNamespace(**child, step=step, note=note)

    clock = iter(range(100, 200))
    drill = Driver(tmp_path, 2, [Fault("kill", 1, 5), Fault("term", 1, 9)], clock=lambda: next(clock))
    children = [started(drill, 0), started(drill, 1), started(drill, -1)]
    drill.look(children)
    inside = Inside(children[1].note)
    inside._signal = lambda number, which: inside._said(number)
    inside.before_step(5)
    steps |= {children[0].note: 5, children[1].note: 5}
    drill.look(children)
    children[1].exit, children[1].mourned = SimpleNamespace(code=137), True
    children[2].process, children[2].in_waiting = 1, False  # the standby takes its place
    drill.look(children)
    (injection,) = drill.injections
    assert injection.in_process and injection.detected_by == "the exit of process 1" and injection.recovered is None
    steps |= {children[0].note: 6, children[2].note: 6}
    drill.look(children)
    assert injection.recovered is not None and len(drill.attempts) == 1
    order = Inside(children[2].note)
    order._signal = lambda number, which: order._said(number)
    order.before_step(9)
    drill.look(children)
    assert [(injection.fault.kind, injection.reached) for injection in drill.injections] == [("kill", 5), ("term", 9)]
    drill.close()


def test_an_order_that_was_carried_out_is_not_carried_out_again_by_the_same_process_in_another_epoch(child, tmp_path):
    drill = Driver(tmp_path, 1, [Fault("slow", 0, 2)])
    told, _ = drill.given(0)
    drill.look([child])
    first = Inside(told[DRILL_FILE])
    first.before_step(2)
    again = Inside(told[DRILL_FILE])
    again.before_step(2)
    assert first._slow_until > 0 and again._slow_until == 0
    drill.close()


@pytest.mark.parametrize(
    ("text", "part"), [("truncate:1@9", "while no process lives"), ("partition:1@9", "on one host")]
)
def test_what_a_job_that_goes_on_in_process_cannot_show_is_refused(text, part, tmp_path):
    (tmp_path / "run.yaml").write_text("task: t.py:task\nsteps: 20\nbatch_size: 4\nelastic: {in_process: true}\n")
    asked = command.Drill(tmp_path / "run.yaml", [], [text])
    with pytest.raises(ConfigError) as error:
        command.run_drill(asked)
    assert f"--fault {text}" in str(error.value) and part in str(error.value)
    assert "elastic.in_process=false" in str(error.value)


def test_the_help_names_every_kind_of_fault(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        raise SystemExit(cli.main(["drill", "--help"]))
    words = set(re.findall(r"[a-z]+", capsys.readouterr().out))
    assert words >= set(KINDS)


ODD = ("²", "٣", "01", "-1", "1e3")
"""Names of folders that are no steps: the first two are digits, and numbers, to Python's `isdigit`."""


def test_a_folder_whose_name_is_no_step_is_no_step_to_a_drill_or_a_launcher(tmp_path, monkeypatch):
    for name in (*ODD, "7"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run_drill" / name).mkdir(parents=True)
        (tmp_path / "run/logs" / f"attempt_{name}").mkdir(parents=True)
    assert corrupt.newest(tmp_path / "run") == 7
    config = SimpleNamespace(resolved_run_dir=lambda: tmp_path / "run")
    assert command._new_folder(config).name == "8"
    logs = Logs()
    logs.open(tmp_path / "run", 1)
    assert logs.folder.name == "attempt_8"
    assert _newest(logs.folder) == 7


@dataclasses.dataclass
class Batch:
    examples: dict


def test_a_nan_is_put_into_a_leaf_that_has_rows_and_its_absence_is_said():
    _, spoiled = _with_nan(None, Batch({"a": jnp.float32(1.0), "b": jnp.ones((2, 3))}), random.Random(0))
    assert np.isnan(spoiled.examples["b"][0]).all() and spoiled.examples["a"] == 1.0
    with pytest.raises(ValueError, match="no leaf with rows of floating-point numbers"):
        _with_nan(None, Batch({"a": jnp.float32(1.0), "b": jnp.ones((0, 3)), "c": jnp.arange(3)}), random.Random(0))


def test_a_switch_that_has_ended_is_said_by_the_fault_and_ends_no_launcher():
    switch = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    switch.wait()
    network = Network([0, 0, 0], switch)
    assert "the switch between the hosts has ended" in network.inject("partition", 0)
    network.heal()
    switch.stdin.close()


@pytest.mark.parametrize(
    ("ours", "part"),
    [
        ({"w": np.zeros((2, 3), np.float32)}, "w is float32[2, 3], and float32[3, 2] without a fault"),
        ({"w": np.zeros((3, 2), np.int32)}, "w is int32[3, 2], and float32[3, 2] without a fault"),
        ({"w": np.ones((3, 2), np.float32)}, "w differs by"),
        ({"w": np.zeros((3, 2), np.float32)}, None),
    ],
)
def test_leaves_of_other_shapes_or_dtypes_differ_though_their_bytes_do_not(ours, part, tmp_path, monkeypatch):
    states = {"clean": {"w": np.zeros((3, 2), np.float32)}, "hurt": ours}
    monkeypatch.setattr(compare, "newest", lambda run: 5)
    monkeypatch.setattr(compare, "saved_state", lambda folder, step: states[folder.parent.name])
    found = compare.different_leaf(tmp_path / "clean", tmp_path / "hurt")
    assert found == "" if part is None else part in found
