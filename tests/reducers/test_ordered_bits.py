"""The ordered reducer gives the same bits on any order of devices; on several processes: tests/system/test_processes.py."""

import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.program.program import Program
from tests.support.reducer_runs import task

ORDERS = [np.random.default_rng(seed).permutation(8) for seed in range(8)]


def run(reducer, order, **settings):
    """Returns the bits of three steps on the devices in this order."""
    devices = [jax.devices()[i] for i in order]
    config = sk.Config(task="t.py:t", reducer=reducer, batch_size=64, steps=3, data={"remainder": "mask"}, **settings)
    made = Program(config, TASK, devices)
    state, losses = made.init(), []
    for _, batch in made.batches():
        state, metrics = made.step(state, batch)
        losses += [np.asarray(x).tobytes() for x in metrics.values()]
    return losses, [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(state))]


TASK = task(optax.adam(1e-2))


@pytest.mark.parametrize("mesh, num", [({"data": 8}, 8), ({"replica": 2, "data": 2, "tensor": 2}, 2)])
def test_eight_orders_of_devices_give_the_same_bits(mesh, num):
    found = [run("ordered", order, mesh=mesh) for order in ORDERS[:num]]
    assert all(other == found[0] for other in found[1:])
