"""What this machine has, and whether a step runs on it."""

from __future__ import annotations

import os
from typing import Any


def diagnose() -> dict[str, Any]:
    """Returns versions, devices and the outcome of one small reduction over all devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec

    from spmdkit import allocator, compat, metrics

    found = metrics.environment(folder=None)
    devices = jax.devices()
    mesh = compat.auto_mesh(np.array(devices), ("data",))
    add = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    total = float(add(jnp.arange(len(devices), dtype=jnp.float32))[0])
    expected = len(devices) * (len(devices) - 1) / 2
    return {
        "python": found["python"],
        "versions": {name: version for name, version in found["versions"].items() if version},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "memories": ", ".join(sorted(memory.kind for memory in devices[0].addressable_memories())),
        "allocator": allocator.describe(os.environ),
        "reduction": "right" if total == expected else f"WRONG: {total}, expected {expected}",
    }
