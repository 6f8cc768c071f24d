"""Real processes with the variables of a foreign starter train together, and are 78 where they contradict each
other."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from starter_environments import SLURM_BATCH, torchrun

from tests.support.environment import environment_of_a_user
from tests.support.messages import says

pytestmark = pytest.mark.processes

TASK = """
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.arange(32, dtype=np.float32).reshape(16, 2) / 16
task = sk.Task(
    lambda key: jnp.ones(2),
    lambda params, batch, key: sk.mean((batch["x"] @ params - batch["y"]) ** 2),
    optax.sgd(0.1),
    train_data={"x": x, "y": x.sum(1)},
)
"""

CONFIG = """
task: task.py:task
steps: 3
batch_size: 8
devices: cpu:2
mesh: {data: -1}
checkpoint: null
log: {every_steps: 1, progress: plain}
"""


@pytest.fixture
def train(tmp_path):
    """Returns a function that trains with one environment for each process, and gives (code, output) of each and the
    losses."""
    (tmp_path / "task.py").write_text(TASK.replace("jnp.ones(2)", "jnp.array([1.0, -2.0])"))
    (tmp_path / "run.yaml").write_text(CONFIG)
    clean = {k: v for k, v in environment_of_a_user().items() if not k.startswith("SLURM_")}
    started = []

    def train(name, environments, *overrides, program=""):
        python = [sys.executable, "-c", program] if program else [sys.executable, "-m", "spmdkit"]
        command = [*python, "train", "run.yaml", f"run_dir={name}", *overrides]
        for env in environments:
            options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(command, env=clean | env, **options))
        ended = [(p.communicate(timeout=100)[0], p.returncode) for p in started[-len(environments) :]]
        metrics = tmp_path / name / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return [(code, output) for output, code in ended], [json.loads(line)["loss"] for line in lines]

    yield train
    for process in started:
        process.kill()
        process.wait()


def test_two_workers_of_torchrun_train_as_one_process_does_while_its_agent_holds_the_port(train):
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = str(agent.getsockname()[1])
        workers = [torchrun(rank, 2, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in (0, 1)]
        together, losses = train("two", workers)
    assert [code for code, _ in together] == [0, 0], together
    assert "2 processes" in together[0][1]
    [(code, output)], alone = train("one", [SLURM_BATCH])
    assert code == 0, output
    says(
        output,
        "note: one process",
        found=("Slurm job 2 of 4 tasks", "not in one of its steps"),
        repair="start it with srun",
    )
    assert losses == pytest.approx(alone, rel=1e-6)
    assert losses[0] > losses[-1] > 0


JOINED_ALREADY = """
import os, sys, threading
import jax

def body():
    jax.distributed.initialize(os.environ["AT"], 2, int(os.environ["ME"]))
    jax.distributed.initialize = None  # a second call is an error
    from spmdkit.cli import main
    sys.exit(main(sys.argv[1:]))

thread = threading.Thread(target=body)  # as ray.train's workers do
thread.start()
thread.join()
"""


def test_processes_that_somebody_else_has_joined_train_as_they_are_in_a_thread_of_a_ray_worker(train):
    """As ray.train's JaxTrainer does it: JAX is joined, has no devices yet, and Ray says nothing of a rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    worker = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7", "AT": address, "JAX_PLATFORMS": "cpu"}
    together, losses = train(
        "joined", [worker | {"ME": str(rank)} for rank in (0, 1)], "devices=cpu:4", program=JOINED_ALREADY
    )
    assert "2 processes, since jax.distributed is initialized already" in together[0][1], together
    assert "on 4 of 4 cpu devices, mesh data 4, 2 processes" in together[0][1]
    [(code, output)], alone = train("one", [{}], "devices=cpu:4")
    assert code == 0, output
    assert losses == pytest.approx(alone, rel=1e-6) and len(losses) == 3


def test_a_number_of_processes_that_nobody_started_is_78_before_anything_waits(train):
    [(code, output)], _ = train("refused", [SLURM_BATCH | {"SPMDKIT_NUM_PROCESSES": "4"}])
    assert code == 78
    assert "Traceback" not in output
    assert "SPMDKIT_NUM_PROCESSES=4" in output and "srun" in output
