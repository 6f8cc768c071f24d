"""The ordered reducer gives the same bits on any order of devices: those of ((g_0 + g_1) + g_2) + ..., in the order of
the mesh.

In one process of CPU devices a psum adds in the order of the mesh too (jaxlib 0.10.2: the bits of `sum` are the same
for all orders of devices here), so orders alone would prove nothing of it. That no psum is in the program:
test_reducer_contract.py; on several processes, where a psum has other bits: tests/system/test_processes.py.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import spmdkit as sk
from spmdkit.communication.reducers import ordered
from spmdkit.communication.reducers.base import ReduceGroup
from spmdkit.program.program import Program
from tests.support.reducer_runs import task

ORDERS = [np.random.default_rng(seed).permutation(8) for seed in range(8)]


def run(reducer, order, **settings):
    """Returns the bits of three steps on the devices in this order."""
    devices = [jax.devices()[i] for i in order]
    config = sk.Config(
        task="t.py:t", reducer=reducer, batch_size=64, steps=3, data={"drop_remainder": False}, **settings
    )
    made = Program(config, TASK, devices)
    state, losses = made.init(), []
    for _, batch in made.batches():
        state, metrics = made.step(state, batch)
        losses += [np.asarray(x).tobytes() for x in metrics.values()]
    return losses, [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(state))]


TASK = task(optax.adam(1e-2))


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh, num", [({"data": 8}, 8), ({"replica": 2, "data": 2, "tensor": 2}, 2)])
def test_eight_orders_of_devices_give_the_same_bits(mesh, num):
    found = [run("ordered", order, mesh=mesh) for order in ORDERS[:num]]
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize("what", ["gradients", "everything else"])
def test_terms_are_added_in_replica_order(what):
    random = np.random.default_rng(0)
    terms = [
        (random.normal(size=(8, *shape)) * 10.0 ** random.integers(-4, 4, (8, *shape))).astype(np.float32)
        for shape in ((3, 5), (9000,))
    ]
    first_to_last = [functools.reduce(np.add, list(x)) for x in terms]
    assert not np.array_equal(terms[1][::-1].sum(0), first_to_last[1]), "another order has other bits"

    def local(*leaves):
        own = [x[0] for x in leaves]
        if what == "gradients":
            return ordered.make().apply(own, [{}, {}], ReduceGroup(("replica", "data"), 8, lambda: None))[0]
        return ordered.add(own, ("replica", "data"))

    for order in ORDERS[:2]:
        mesh = Mesh(np.array(jax.devices())[order].reshape(2, 4), ("replica", "data"))
        rows = PartitionSpec(("replica", "data"))
        found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=PartitionSpec()))(*terms)
        assert all(np.array_equal(x, y) for x, y in zip(found, first_to_last, strict=True))
