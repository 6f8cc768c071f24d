"""Starting again with the processes that are left: which sizes there are, and once with real processes."""

import json
import signal

import numpy as np
import pytest

from spmdkit.checkpoint import read_state
from spmdkit.elastic.sizes import ALLOWED, Elastic, Size
from spmdkit.errors import ConfigError, ExitCode
from spmdkit.launch.root_cause import Exit, lost
from tests.support.forks import Process
from tests.tools.drill import conftest as drill

CONFIG = "task: task.py:task\nrun_dir: run\nsteps: 40\nbatch_size: {batch}\nmicrobatches: {micro}\ndevices: {devices}\nmesh: {mesh}\n"  # noqa: E501


@pytest.fixture
def config(tmp_path):
    (tmp_path / "task.py").write_text("task = None")

    def write(batch=24, micro=1, devices="cpu:4", mesh="{data: -1}"):
        path = tmp_path / "run.yaml"
        path.write_text(CONFIG.format(batch=batch, micro=micro, devices=devices, mesh=mesh))
        return ["train", str(path)]

    return write


def test_batch_stays_and_rows_per_device_are_bounded(config):
    sizes = Elastic(config(), "1:4", 4)
    assert (sizes.first, sizes.devices_per_process) == (Size(4, 1), 1)
    numbers = [(4, 1), (3, 2), (2, 2), (1, 4), (1, 4)]
    assert [sizes.next_size(4, gone) for gone in (0, 1, 2, 3, 4)] == [Size(*each) for each in numbers]
    sizes = Elastic(config(batch=48, micro=2, devices="cpu:8"), "2:4", 4)
    assert sizes.devices_per_process == 2
    assert [sizes.next_size(4, gone) for gone in (0, 1, 2)] == [Size(4, 2), Size(3, 4), Size(2, 4)]


def test_sizes_that_do_not_divide_are_skipped(config):
    assert Elastic(config(batch=16), "1:4", 4).next_size(4, 1) == Size(2, 2)
    assert Elastic(config(batch=16), "3:4", 4).next_size(4, 1) is None
    assert Elastic(config(batch=16, mesh="{data: -1, fsdp: 2}"), "1:4", 4).next_size(4, 2) == Size(2, 2)
    assert Elastic(config(batch=16, mesh="{data: -1, tensor: 2}", devices="cpu:4"), "1:4", 4).next_size(4, 3) is None


def test_file_sets_the_size_of_the_next_start(config, tmp_path):
    sizes = Elastic(config(), "1:4", 2, devices_per_process=1)
    (tmp_path / "run").mkdir()
    for text, expected in (("4", Size(4, 1)), ("3\n", Size(3, 1)), ("9", Size(1, 2)), ("four", Size(1, 2))):
        (tmp_path / "run" / ALLOWED).write_text(text)
        assert sizes.next_size(2, 1) == expected, text


@pytest.mark.parametrize(
    ("options", "between", "said"),
    [
        ({}, "4", ("two numbers", "Try --elastic 1:4")),
        ({}, "3:2", ("two numbers",)),
        ({}, "1:2", ("-n 4", "Try -n 2")),
        ({"mesh": "{data: 4}"}, "2:4", ("fixed", "Write data: -1")),
        ({"micro": "auto"}, "2:4", ("microbatches", "Give a number")),
        ({"batch": 18}, "2:4", ("do not fit",)),
        ({"devices": "cpu:6"}, "2:4", ("leaves 2 over",)),
    ],
)
def test_impossible_elastic_options_are_rejected(config, options, between, said):
    with pytest.raises(ConfigError) as error:
        Elastic(config(**options), between, 4)
    assert all(part in str(error.value) for part in said), error.value


def test_lost_processes_are_killed_or_missed_ones():
    killed = [Exit(0, 75, 1, blamed=(1,)), Exit(1, -signal.SIGKILL, 0), Exit(2, -signal.SIGTERM, 2, ended_by_us=True)]
    assert lost(killed) == {1}
    silent = [Exit(0, 75, 0, blamed=(2,)), Exit(1, 75, 1, blamed=(2,)), Exit(2, -signal.SIGKILL, 2, ended_by_us=True)]
    assert lost(silent) == {2}
    assert lost([Exit(0, 70, 0), Exit(1, 75, 1, blamed=(0,))]) == frozenset(), "its machine is there"
    assert lost([Exit(0, int(ExitCode.PREEMPTED), 0), Exit(1, -signal.SIGABRT, 1)]) == frozenset()
    assert lost([Exit(0, -signal.SIGKILL, 0, assigned_code=76)]) == {0}


PAUSE = '    pause = sk.Hook("pause", before_step=lambda run, step, state: time.sleep(pause_s))\n'
KILL = """    import os, signal
    from pathlib import Path

    def before(run, step, state):
        if kill and step == 12 and run.cluster.process_index == 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    pause = sk.Hook("pause", before_step=before)
"""
TASK = drill.TASK.replace(PAUSE, KILL).replace("pause_s=0.01", "kill=False")


@pytest.mark.processes
def test_remaining_processes_train_to_the_same_numbers(forks, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    text = CONFIG.format(batch=24, micro=1, devices="cpu:2", mesh="{data: -1}").replace("steps: 40", "steps: 24")
    (tmp_path / "run.yaml").write_text(text + "checkpoint: {every_steps: 5}\n")
    launch = ["launch", "-n", "2", "--max-restarts", "3", "--elastic", "1:2", "--"]
    command = [*launch, "train", "run.yaml", "task_args.kill=true"]
    job = Process(command, tmp_path, forks=True)
    one, clean = forks.run([job, Process(["train", "run.yaml", "run_dir=clean"], tmp_path)], 200)
    assert (one.code, clean.code) == (0, 0), one.output + clean.output
    assert "1 of 2 processes are lost; the next start has 1, with microbatches=2" in one.output
    read = lambda run: [json.loads(x) for x in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
    ours, theirs = read("run"), read("clean")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
    ours, theirs = (read_state(tmp_path / run / "checkpoints") for run in ("run", "clean"))
    for path, leaf in theirs.items():
        assert np.linalg.norm(ours[path] - leaf) <= 1e-5 * max(np.linalg.norm(leaf), 1e-3), path
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == ["attempt_1", "attempt_2"]
    assert sorted(p.name for p in (tmp_path / "run" / "logs" / "attempt_2").iterdir()) == ["p000"]
    assert (tmp_path / "died").exists()
