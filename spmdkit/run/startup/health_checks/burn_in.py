"""The same products on every device for some seconds. A device with different bits is wrong, a slower one is slow.

A faulty chip computes wrong results only for some operands and only sometimes (Hochschild et al., "Cores that don't
count", 2021). So each device repeats chains of products with the same operands, and every result is checked: 32 bits
per chain are sent to the host.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import BURN_IN_READY_S

SIZES, SIZE = {"cpu": 256}, 4096  # rows of the square factors, by platform and by default
PRODUCTS = 8  # per chain
MAX_DIGESTS = 4  # reported distinct results per device


def burn_in_devices(devices: Sequence[jax.Device], process_index: int, seconds: float) -> list[dict[str, Any]]:
    """Returns a result per device of this process: index in `devices`, process, host, platform, kind, digests (distinct
    digests of its chains), chains, gflops (median)."""
    mine = [(index, device) for index, device in enumerate(devices) if device.process_index == process_index]
    ready = threading.Barrier(len(mine), timeout=BURN_IN_READY_S)

    def run(index: int, device: jax.Device) -> dict[str, Any]:
        where = {"device": index, "process": process_index, "host": socket.gethostname()}
        kind = {"platform": device.platform, "kind": device.device_kind}
        return where | kind | _burn_one(device, seconds, ready)

    with ThreadPoolExecutor(len(mine), thread_name_prefix="burn") as threads:
        return list(threads.map(run, *zip(*mine, strict=True)))


def _burn_one(device: jax.Device, seconds: float, ready: threading.Barrier) -> dict[str, Any]:
    size = SIZES.get(device.platform, SIZE)
    a, b = (jax.device_put(x, device) for x in operands(size, device))
    digests, rates = {f"{int(_chain(a, b)):08x}": None}, list[float]()  # the first chain compiles
    ready.wait()
    deadline = Deadline(seconds)
    while not rates or not deadline.expired:
        begun = time.perf_counter()
        digest = f"{int(_chain(a, b)):08x}"
        rates.append(PRODUCTS * 2 * size**3 / (time.perf_counter() - begun) / 1e9)
        digests[digest] = None
    return {"digests": list(digests)[:MAX_DIGESTS], "chains": len(rates) + 1, "gflops": statistics.median(rates)}


def operands(size: int, device: jax.Device) -> tuple[np.ndarray, np.ndarray]:
    """Returns two float32[size, size], the same for every device."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    return a, b / np.float32(np.sqrt(size))


@jax.jit
def _chain(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns uint32[]: a digest of a b b ... b that depends on every bit of every element and on its position."""

    def one(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x @ b, None

    x, _ = lax.scan(one, a, None, length=PRODUCTS)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    weights = 2 * lax.iota(jnp.uint32, bits.size) + jnp.uint32(1)
    weighted_sum: jax.Array = (bits.reshape(-1) * weights).sum(dtype=jnp.uint32)
    return weighted_sum
