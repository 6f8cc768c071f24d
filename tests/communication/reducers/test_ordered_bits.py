"""The ordered reducer gives the same bits on any order of devices: those of ((g_0 + g_1) + g_2) + ..., in the order of
the mesh.

In one process of CPU devices a psum adds in the order of the mesh too (jaxlib 0.10.2: the bits of `sum` are the same
for all orders of devices here), so orders alone would prove nothing of it. That no psum is in the program:
test_reducer_contract.py; on several processes, where a psum has other bits: tests/system/test_processes.py.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.communication.reducers import ordered
from spmdkit.program.program import Program
from tests.support.forms import slow_except
from tests.support.reducer_runs import alone, bits, task

ORDERS = ([0, 1, 2, 3], [2, 3, 1, 0])
TASK = task(optax.adam(1e-2))


def run(order, mesh):
    """Returns the bits of three steps on the devices in this order."""
    config = sk.Config(
        task="t.py:t", reducer="ordered", batch_size=64, steps=3, data={"drop_remainder": False}, mesh=mesh
    )
    made = Program(config, TASK, [jax.devices()[i] for i in order])
    state, losses = made.init(), []
    for _, batch in made.batches():
        state, metrics = made.step(state, batch)
        losses += bits(list(metrics.values()))
    return losses, bits(state)


@pytest.mark.parametrize("mesh", slow_except([{"data": 4}], [{"data": 4}, {"replica": 2, "tensor": 2}]), ids=str)
def test_orders_of_devices_give_the_same_bits(mesh):
    found = [run(order, mesh) for order in ORDERS]
    assert found[0] == found[1]


@pytest.mark.parametrize("what", ["gradients", "everything else"])
def test_terms_are_added_in_replica_order(what):
    random = np.random.default_rng(0)
    terms = [
        (random.normal(size=(8, *shape)) * 10.0 ** random.integers(-4, 4, (8, *shape))).astype(np.float32)
        for shape in ((3, 5), (9000,))
    ]
    first_to_last = [functools.reduce(np.add, list(x)) for x in terms]
    assert not np.array_equal(terms[1][::-1].sum(0), first_to_last[1]), "another order has other bits"
    made = ordered.make()
    if what == "everything else":
        made = dataclasses.replace(made, apply=lambda leaves, states, over: (ordered.add(leaves, over.axes), states))
    found, _ = alone(made, num=8)(terms)
    assert all(np.array_equal(x, y) for x, y in zip(found, first_to_last, strict=True))
