"""`save` stands in the training loop's way no longer than orbax alone."""

import statistics
import time

import jax.numpy as jnp

from spmdkit.checkpoint import Checkpoints, orbax_backend
from tests.checkpoint.checkpoint_blocking import blocked_s, many_leaves

RATIO = 1.1


def test_saving_blocks_little_longer_than_orbax_alone(directory, monkeypatch):
    """Both times come from the same call, so a busy machine slows both."""
    inside = []
    real = orbax_backend.start_save

    def timed(*args):
        start = time.perf_counter()
        real(*args)
        inside.append(time.perf_counter() - start)

    monkeypatch.setattr(orbax_backend, "start_save", timed)
    state = {"params": many_leaves(300, 4), "step": jnp.int32(1)}
    checkpoints = Checkpoints(directory)
    whole = []
    for step in range(9):
        start = time.perf_counter()
        checkpoints.save(step, state, {"seed": 0}, {"loss": 1.0})
        whole.append(time.perf_counter() - start)
        checkpoints.wait()
    checkpoints.close()
    ratios = [a / b for a, b in zip(whole[1:], inside[1:], strict=True)]
    assert statistics.median(ratios) < RATIO, ratios


def test_the_paired_benchmark_runs(tmp_path):
    times = blocked_s(tmp_path, many_leaves(3, 1), repeats=2)
    assert {name: len(values) for name, values in times.items()} == {
        "spmdkit": 2,
        "async_checkpointer": 2,
        "checkpoint_manager": 2,
    }
