"""Real processes with the variables of a foreign starter train together."""

from __future__ import annotations

import json
import socket

import pytest

from tests.cluster.starter_environments import SLURM_BATCH, torchrun
from tests.support.forks import Process
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


def train(forks, folder, environments, program=""):
    """Trains with one environment for each process; returns the output of each, and the losses."""
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "program.py").write_text(program)
    words = [*(["program.py"] if program else []), "train", "run.yaml", "run_dir=run"]
    ended = forks.run([Process(words, folder, env) for env in environments], timeout_s=100)
    assert [process.code for process in ended] == [0] * len(ended), ended
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [process.output for process in ended], [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, forks):
    """The losses of one process, in an allocation of Slurm that starts none."""
    [output], losses = train(forks, tmp_path_factory.mktemp("alone"), [SLURM_BATCH])
    found = ("Slurm job 2 of 4 tasks", "not in one of its steps")
    assert_parts(output, "note: one process", found=found, repair="start it with srun")
    assert losses[0] > losses[-1] > 0 and len(losses) == 3
    return losses


@pytest.mark.slow
def test_torchrun_workers_train_beside_their_agent(tmp_path, forks, alone):
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = str(agent.getsockname()[1])
        workers = [torchrun(rank, 2, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in (0, 1)]
        outputs, losses = train(forks, tmp_path, workers)
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


def test_processes_that_are_joined_already_train(tmp_path, forks, alone):
    """As ray.train's JaxTrainer does it: JAX is joined, has no devices yet, and Ray gives no rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    worker = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7", "AT": address, "JAX_PLATFORMS": "cpu"}
    outputs, losses = train(forks, tmp_path, [worker | {"ME": str(rank)} for rank in (0, 1)], program=JOINED_ALREADY)
    assert "2 processes, since jax.distributed is initialized already" in outputs[0], outputs
    assert "on 2 of 2 cpu devices, mesh data 2, 2 processes" in outputs[0]
    assert losses == pytest.approx(alone, rel=1e-6)
