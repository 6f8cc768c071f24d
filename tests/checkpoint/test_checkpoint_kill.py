"""SIGKILL at any moment of a save loop: what was reported committed is there, and what is listed restores."""

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from spmdkit.checkpoint import Checkpoints, ls
from tests.checkpoint.checkpoint_worker import value_of
from tests.support.checkpoint_states import jax

WORKER = Path(__file__).parent / "checkpoint_worker.py"
ABSTRACT = {"w": jax.ShapeDtypeStruct((8, 4096), jnp.float32), "step": jax.ShapeDtypeStruct((), jnp.int32)}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("num", [2, 100])
def test_local_kills_during_saves_lose_no_committed_step(directory, num):
    delays, kills, unfinished, newest = random.Random(0), 0, 0, 0
    while kills < num or (not unfinished and kills < 6 * num):
        kills += 1
        reported = save_until_killed(directory, delays.uniform(0.05, 0.5))
        unfinished += any("orbax-checkpoint-tmp" in path.name for path in directory.iterdir())
        rows = ls(directory)
        assert rows and all(row["complete"] for row in rows), rows
        reader = Checkpoints(directory, is_main=False)
        for step in reader.steps():
            state, record = reader.restore(step, ABSTRACT)
            assert record == {"step": step} and state["step"] == step
            assert np.array_equal(state["w"], value_of(step))
        assert reader.latest() >= max([newest, *reported])
        newest = reader.latest()
        reader.close()
    assert unfinished > 0, "no kill hit a save: this test has shown nothing"
    assert newest > 0


def save_until_killed(directory: Path, delay_s: float) -> list[int]:
    """Starts the save loop, kills it `delay_s` after its first commit; returns the steps that it reported committed."""
    worker = subprocess.Popen([sys.executable, WORKER, "loop", directory], stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(60, worker.kill)
    guard.start()
    try:
        assert worker.stdout.readline() == "ready\n"
        first = worker.stdout.readline()
        threading.Timer(delay_s, worker.send_signal, [signal.SIGKILL]).start()
        rest = worker.stdout.read()
        assert worker.wait(10) == -signal.SIGKILL
    finally:
        guard.cancel()
        worker.kill()
        worker.stdout.close()
    return [int(line) for line in (first + rest).split("\n")[:-1]]
