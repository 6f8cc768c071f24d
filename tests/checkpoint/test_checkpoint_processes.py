"""Several real processes save one checkpoint together; another number of processes restores it."""

import shutil
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
    """Returns what each process printed; all must end with 0 in time, or the victim by SIGKILL and the others
    somehow."""
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


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    """What two processes saved; each test gets a copy."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_processes(directory, 2, "save")
    return directory


@pytest.mark.parametrize("num_readers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_what_two_processes_saved_any_number_restores(saved_by_two, directory, num_readers):
    shutil.copytree(saved_by_two, directory, dirs_exist_ok=True)
    assert inspect(directory)["num_processes"] == 2
    run_processes(directory, num_readers, "restore")


def test_two_process_checkpoint_restores_on_eight_devices(saved_by_two, directory):
    shutil.copytree(saved_by_two, directory, dirs_exist_ok=True)
    checkpoints = Checkpoints(directory)
    want = global_state(4)
    state, _ = checkpoints.restore(
        4, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
    )
    assert np.array_equal(state["split"], value_of(4, 24))
    checkpoints.close()


def test_what_this_process_saved_two_processes_restore(directory):
    checkpoints = Checkpoints(directory)
    for step in (3, 4):
        state = {"split": value_of(step, 24), "whole": value_of(step)[:3], "empty": np.zeros((0, 2), np.float32)}
        checkpoints.save(step, jax.tree.map(jnp.asarray, state), {"seed": step})
    checkpoints.close()
    run_processes(directory, 2, "restore")


def test_refusal_of_process_0_is_raised_everywhere(directory):
    for output in run_processes(directory, 2, "full_disk"):
        assert "CheckpointWriteError no room" in output, output


def test_failed_write_of_one_process_fails_all(directory):
    for output in run_processes(directory, 2, "lose_one", 60):
        for words in ("saving step 2", "No space left on device", "intact are 1", "saving step 3", "intact are 1, 2"):
            assert words in output, (words, output)
