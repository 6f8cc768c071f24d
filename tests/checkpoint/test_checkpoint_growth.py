"""A run may save ten thousand times: what orbax asks tensorstore for its log does not stay behind (benchmarks/save_growth.py has the KiB)."""

import gc

import jax.numpy as jnp

from spmdkit.checkpoint import Checkpoints

SAVES = 10


def metrics_of_tensorstore():
    """Returns how many values of tensorstore's metrics there are: the lists of `{"value": ...}` that it never frees."""
    gc.collect()
    lists = (x for x in gc.get_objects() if type(x) is list and len(x) == 1 and type(x[0]) is dict)
    return sum(x[0].keys() == {"value"} for x in lists)


def test_no_metric_of_tensorstore_stays_behind_a_save(directory):
    checkpoints = Checkpoints(directory, keep=1)
    before = metrics_of_tensorstore()
    for step in range(1, SAVES + 1):
        checkpoints.save(step, {"w": jnp.ones(4)}, {})
        checkpoints.wait()
    checkpoints.close()
    assert metrics_of_tensorstore() - before < SAVES
