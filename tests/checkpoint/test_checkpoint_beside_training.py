"""Reading beside a run that saves as fast as it goes and keeps one step: nothing is called damaged, nothing goes while
it is read."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdkit.checkpoint import Checkpoints, export, hold_step, inspect, ls, newest_step
from tests.checkpoint.checkpoint_worker import value_of

WORKER = Path(__file__).parent / "checkpoint_worker.py"
ABSTRACT = {"params": {"w": jax.ShapeDtypeStruct((8, 4096), jnp.float32)}}


@pytest.mark.processes
def test_steps_being_read_survive_quick_retention(directory, tmp_path):
    worker = subprocess.Popen([sys.executable, WORKER, "quick", directory])
    reader, deadline = Checkpoints(directory, is_main=False), time.monotonic() + 90
    try:
        while not ls(directory):
            assert worker.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        for number in range(2):
            with hold_step(directory, lambda: newest_step(directory)) as step:
                while (
                    max(reader.steps()) < step + 2 or step + 1 in reader.steps()
                ):  # a newer one is committed, and deleted
                    assert worker.poll() is None and time.monotonic() < deadline
                    time.sleep(0.002)
                state, _ = reader.restore(step, ABSTRACT)
                assert np.array_equal(state["params"]["w"], value_of(step))
            rows = ls(directory)
            assert all(row["complete"] for row in rows), rows
            assert inspect(directory)["complete"]
            assert export(directory, None, tmp_path / str(number)) > step
    finally:
        worker.kill()
        worker.wait(30)
    assert len(reader.steps()) <= 3, "what is not read any more is deleted at a later save"
