"""Starting again with the processes that are left: which sizes there are, and once with real processes."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from spmdkit.elastic.sizes import ALLOWED, Elastic, Size
from spmdkit.errors import ConfigError, ExitCode
from spmdkit.launch.root_cause import Exit, lost
from tests.support.forks import Forks, Process

CONFIG = "task: task.py:task\nrun_dir: run\nsteps: 40\nbatch_size: {batch}\nmicrobatches: {micro}\ndevices: {devices}\nmesh: {mesh}\n"  # noqa: E501


@pytest.fixture
def config(tmp_path):
    (tmp_path / "task.py").write_text("task = None")

    def write(batch=24, micro=1, devices="cpu:4", mesh="{data: -1}"):
        path = tmp_path / "run.yaml"
        path.write_text(CONFIG.format(batch=batch, micro=micro, devices=devices, mesh=mesh))
        return ["train", str(path)]

    return write


def test_the_batch_stays_and_no_device_gets_more_rows_at_once(config):
    sizes = Elastic(config(), "1:4", 4)
    assert (sizes.first, sizes.devices_per_process) == (Size(4, 1), 1)
    assert [sizes.after(4, gone) for gone in (0, 1, 2, 3, 4)] == [
        Size(4, 1),
        Size(3, 2),
        Size(2, 2),
        Size(1, 4),
        Size(1, 4),
    ]
    sizes = Elastic(config(batch=48, micro=2, devices="cpu:8"), "2:4", 4)
    assert sizes.devices_per_process == 2
    assert [sizes.after(4, gone) for gone in (0, 1, 2)] == [Size(4, 2), Size(3, 4), Size(2, 4)]
    for size in (sizes.after(4, gone) for gone in (0, 1, 2)):
        assert (
            48 % (size.processes * 2 * size.microbatches) == 0 and 48 // (size.processes * 2 * size.microbatches) <= 3
        )


def test_a_number_that_divides_nothing_is_passed_over_for_the_next_smaller_one(config):
    assert Elastic(config(batch=16), "1:4", 4).after(4, 1) == Size(2, 2)
    assert Elastic(config(batch=16), "3:4", 4).after(4, 1) is None
    assert Elastic(config(batch=16, mesh="{data: -1, fsdp: 2}"), "1:4", 4).after(4, 2) == Size(2, 2)
    assert Elastic(config(batch=16, mesh="{data: -1, tensor: 2}", devices="cpu:4"), "1:4", 4).after(4, 3) is None


def test_somebody_may_say_how_many_the_next_start_has(config, tmp_path):
    sizes = Elastic(config(), "1:4", 2, devices_per_process=1)
    (tmp_path / "run").mkdir()
    for text, expected in (("4", Size(4, 1)), ("3\n", Size(3, 1)), ("9", Size(1, 2)), ("four", Size(1, 2))):
        (tmp_path / "run" / ALLOWED).write_text(text)
        assert sizes.after(2, 1) == expected, text


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
def test_what_cannot_be_elastic_is_refused(config, options, between, said):
    with pytest.raises(ConfigError) as error:
        Elastic(config(**options), between, 4)
    assert all(part in str(error.value) for part in said), error.value


def test_who_is_lost_is_who_was_killed_or_missed_and_not_who_ended_with_an_error_of_its_own():
    killed = [Exit(0, 75, 1, blamed=(1,)), Exit(1, -signal.SIGKILL, 0), Exit(2, -signal.SIGTERM, 2, ended_by_us=True)]
    assert lost(killed) == {1}
    silent = [Exit(0, 75, 0, blamed=(2,)), Exit(1, 75, 1, blamed=(2,)), Exit(2, -signal.SIGKILL, 2, ended_by_us=True)]
    assert lost(silent) == {2}
    assert lost([Exit(0, 70, 0), Exit(1, 75, 1, blamed=(0,))]) == frozenset(), "its machine is there"
    assert lost([Exit(0, int(ExitCode.PREEMPTED), 0), Exit(1, -signal.SIGABRT, 1)]) == frozenset()
    assert lost([Exit(0, -signal.SIGKILL, 0, judged=76)]) == {0}


TASK = """
import os, signal
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

@sk.task
def task(victim=-1):
    x = np.random.default_rng(0).normal(size=(120, 8)).astype(np.float32)

    def loss_fn(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w"])
        if key is not None:
            h = h * jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, (16,)))(sk.example_keys())
        return sk.mean((h @ params["v"] - batch["y"]) ** 2)

    def before(run, step, state):
        died = Path("died")
        if step == 17 and victim == run.cluster.process_index and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    init = lambda key: {"w": jax.random.normal(key, (8, 16)) / 3, "v": jnp.zeros(16)}
    hooks = [sk.Hook("victim", before_step=before)]
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data={"x": x, "y": np.sin(x.sum(1))}, hooks=hooks)
"""


@pytest.mark.processes
def test_after_a_death_of_one_of_four_three_go_on_with_the_same_examples_to_the_same_numbers(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(
        CONFIG.format(batch=24, micro=1, devices="cpu:4", mesh="{data: -1}") + "checkpoint: {every_steps: 5}\n"
    )
    launch = lambda *more: [
        "launch",
        "-n",
        "4",
        "--max-restarts",
        "3",
        "--elastic",
        "2:4",
        "--",
        "train",
        "run.yaml",
        *more,
    ]
    with Forks() as forks:
        one, clean = forks.run(
            [
                Process(launch("task_args.victim=2"), tmp_path, forks=True),
                Process(["train", "run.yaml", "run_dir=clean"], tmp_path),
            ],
            200,
        )
    assert (one.code, clean.code) == (0, 0), one.output + clean.output
    assert "1 of 4 processes are lost; the next start has 3, with microbatches=2" in one.output
    trained = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("run", "clean")
    ]
    assert [line["step"] for line in trained[0]] == [line["step"] for line in trained[1]]
    for ours, theirs in zip(*trained, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    from spmdkit.checkpoint import read_state

    ours, theirs = (read_state(tmp_path / run / "checkpoints") for run in ("run", "clean"))
    for path, leaf in theirs.items():
        assert np.linalg.norm(ours[path] - leaf) <= 1e-5 * max(np.linalg.norm(leaf), 1e-3), path
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == ["attempt_1", "attempt_2"]
    assert sorted(p.name for p in (tmp_path / "run" / "logs" / "attempt_2").iterdir()) == ["p000", "p001", "p002"]
    assert Path(tmp_path / "died").exists() and os.path.isdir(tmp_path)
