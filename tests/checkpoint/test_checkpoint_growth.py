"""A run may save ten thousand times: what orbax asks tensorstore for its log does not stay behind (benchmarks/save_growth.py has the KiB)."""

import gc

import jax.numpy as jnp
import pytest

from spmdkit.checkpoint import Checkpoints

SAVES = 10


def metrics_of_tensorstore():
    """Returns how many values of tensorstore's metrics are new and stay: the lists of `{"value": ...}` that it never frees."""
    gc.collect(0)  # what stays of the youngest is in generation 1 now
    lists = (x for x in gc.get_objects(generation=1) if type(x) is list and len(x) == 1 and type(x[0]) is dict)
    return sum(x[0].keys() == {"value"} for x in lists)


@pytest.fixture
def only_the_new():
    """What there is already is in generation 2, and nothing else gets there: all objects of a whole suite need not be walked."""
    gc.collect(1)
    gc.disable()
    yield
    gc.enable()


def test_no_metric_of_tensorstore_stays_behind_a_save(directory, only_the_new):
    checkpoints = Checkpoints(directory, keep=1)
    for step in range(1, SAVES + 1):
        checkpoints.save(step, {"w": jnp.ones(4)}, {})
        checkpoints.wait()
    checkpoints.close()
    assert metrics_of_tensorstore() < SAVES
