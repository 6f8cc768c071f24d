"""XLA's thread pools on several CPU devices have room for the launches and for the executions of all devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spmdkit.cluster.join import num_threads

PROGRAM = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
jax.config.update("jax_num_cpu_devices", 2)
rows = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
reduce = lambda xs: [jax.lax.psum(x @ x, "data") for x in xs]
step = jax.jit(jax.shard_map(reduce, mesh=rows.mesh, in_specs=rows.spec, out_specs=rows.spec, check_vma=False))
xs = [jax.device_put(np.zeros((400, 200), np.float32), rows) for _ in range(12)]
for _ in range(100):  # more than the 32 executions that XLA has in flight
    xs = step(xs)
jax.block_until_ready(xs)
"""


@pytest.mark.processes
def test_many_executions_in_flight(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "NPROC": str(num_threads(2)),
        "XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=30",
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, timeout=200, check=True)
