"""Several real processes save one checkpoint together; another number of processes restores it."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdkit.checkpoint import inspect
from tests.checkpoint.checkpoint_worker import Checkpoints, global_state, value_of

WORKER = Path(__file__).parent / "checkpoint_worker.py"

pytestmark = pytest.mark.processes


def run_processes(
    directory: Path | str, num_processes: int, command: str, timeout_s: float = 120, victim: int | None = None
) -> list[str]:
    """Returns what each process printed; all must end with 0 in time, or the victim by SIGKILL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, "process", directory, address, str(index), str(num_processes), command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(num_processes)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        outputs = [worker.communicate(timeout=max(1, deadline - time.monotonic()))[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    if victim is not None:
        assert workers[victim].returncode == -signal.SIGKILL, outputs
        return outputs
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0 and "done" in output, output
    return outputs


def test_two_processes_save_restore_and_report_failures(tmp_path):
    """A state saved by two processes, one saved by this process, a refusal of process 0, a failed write of one."""
    checkpoints = Checkpoints(tmp_path / "alone")
    for step in (3, 4):
        state = {"split": value_of(step, 24), "whole": value_of(step)[:3], "empty": np.zeros((0, 2), np.float32)}
        checkpoints.save(step, jax.tree.map(jnp.asarray, state), {"seed": step})
    checkpoints.close()
    commands = "save:saved,restore:saved,restore:alone,full_disk:full,lose_one:lost"
    for output in run_processes(tmp_path, 2, commands):
        assert "CheckpointWriteError no room" in output, output
        for words in ("saving step 2", "No space left on device", "intact are 1", "saving step 3", "intact are 1, 2"):
            assert words in output, (words, output)
    assert inspect(tmp_path / "saved")["num_processes"] == 2
    checkpoints = Checkpoints(tmp_path / "saved")
    want = global_state(4)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
    state, _ = checkpoints.restore(4, abstract)  # on eight devices of one process
    assert np.array_equal(state["split"], value_of(4, 24))
    checkpoints.close()
