"""Real processes with the variables of a foreign starter train together."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from tests.cluster.starter_environments import SLURM_BATCH, torchrun
from tests.support.environment import environment_of_a_user
from tests.support.messages import assert_parts

pytestmark = pytest.mark.processes

TASK = """
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.arange(32, dtype=np.float32).reshape(16, 2) / 16
task = sk.Task(
    lambda key: jnp.array([1.0, -2.0]),
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


CLEAN = {k: v for k, v in environment_of_a_user().items() if not k.startswith("SLURM_")}


def train(folder, environments, program=""):
    """Trains with one environment for each process; returns (exit code, output) of each, and the losses."""
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    python = [sys.executable, "-c", program] if program else [sys.executable, "-m", "spmdkit"]
    options = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen([*python, "train", "run.yaml", "run_dir=run"], env=CLEAN | env, **options)
        for env in environments
    ]
    try:
        ended = [(process.communicate(timeout=100)[0], process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [code for _, code in ended] == [0] * len(ended), ended
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [output for output, _ in ended], [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process, in an allocation of Slurm that starts none."""
    [output], losses = train(tmp_path_factory.mktemp("alone"), [SLURM_BATCH])
    found = ("Slurm job 2 of 4 tasks", "not in one of its steps")
    assert_parts(output, "note: one process", found=found, repair="start it with srun")
    assert losses[0] > losses[-1] > 0 and len(losses) == 3
    return losses


@pytest.mark.slow
def test_torchrun_workers_train_beside_their_agent(tmp_path, alone):
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = str(agent.getsockname()[1])
        workers = [torchrun(rank, 2, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in (0, 1)]
        outputs, losses = train(tmp_path, workers)
    assert "2 processes" in outputs[0]
    assert losses == pytest.approx(alone, rel=1e-6)


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


def test_processes_that_are_joined_already_train(tmp_path, alone):
    """As ray.train's JaxTrainer does it: JAX is joined, has no devices yet, and Ray gives no rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    worker = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7", "AT": address, "JAX_PLATFORMS": "cpu"}
    outputs, losses = train(tmp_path, [worker | {"ME": str(rank)} for rank in (0, 1)], program=JOINED_ALREADY)
    assert "2 processes, since jax.distributed is initialized already" in outputs[0], outputs
    assert "on 2 of 2 cpu devices, mesh data 2, 2 processes" in outputs[0]
    assert losses == pytest.approx(alone, rel=1e-6)
