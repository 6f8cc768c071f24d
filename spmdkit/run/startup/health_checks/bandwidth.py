"""Bandwidth of each link between neighbors, and of collectives over each axis of a mesh.

Links are measured in rounds of pairs without shared devices, in the same order on all processes. Source of the busbw
convention: nccl-tests, doc/PERFORMANCE.md (an all-reduce over n devices moves 2 (n-1) / n of its bytes over each link).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat

BYTES, MAX_BYTES = {"cpu": 2**20}, 2**26  # sent by one device, by platform and by default
REPEATS = 5


def links(devices: Sequence[jax.Device], process_index: int) -> list[dict[str, Any]]:
    """Returns `{"from", "to", "gb_per_s"}` of the links from devices of this process to the next device. Collective:
    all processes call it."""
    measured = []
    for begin, end in _rounds(len(devices)):
        pair = [devices[begin], devices[end]]
        if process_index not in {device.process_index for device in pair}:
            continue
        seconds = _seconds_of(compat.auto_mesh(np.array(pair), ("pair",)), "pair", _swap)
        if pair[0].process_index == process_index:
            measured.append({"from": begin, "to": end, "gb_per_s": _bytes(pair[0]) / seconds / 1e9})
    return measured


def _rounds(num: int) -> list[tuple[int, int]]:
    """Returns the pairs of neighbors on a ring, first those with an even first member."""
    if num < 2:
        return []
    pairs = [(i, i + 1) for i in range(num - 1)] + ([(num - 1, 0)] if num > 2 else [])
    return [*pairs[:-1:2], *pairs[1:-1:2], pairs[-1]]


def bandwidths(mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Returns axis -> GB/s per link in an all_reduce along it, for axes larger than one. Collective: all processes call
    it."""
    rates = {}
    for axis, size in mesh.shape.items():
        if size > 1:
            seconds = _seconds_of(mesh, axis, lambda x, axis=axis: lax.psum(x, axis))
            rates[axis] = 2 * (size - 1) / size * _bytes(mesh.devices.flat[0]) / seconds / 1e9
    return rates


def _swap(x: jax.Array) -> jax.Array:
    swapped: jax.Array = lax.ppermute(x, "pair", [(0, 1), (1, 0)])
    return swapped


def _seconds_of(mesh: jax.sharding.Mesh, axis: str, fn: Any) -> float:
    """Returns the median seconds of a function of the local float32[...] of each device."""
    spec = PartitionSpec(tuple(mesh.axis_names))
    length = _bytes(mesh.devices.flat[0]) // 4
    make = jax.jit(lambda: jnp.ones(mesh.devices.size * length, jnp.float32), out_shardings=NamedSharding(mesh, spec))
    step = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.block_until_ready(make())
    jax.block_until_ready(step(x))
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(step(x))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _bytes(device: jax.Device) -> int:
    return BYTES.get(device.platform, MAX_BYTES)


def table(rates: Mapping[str, float]) -> str:
    """Returns `data 1.2 GB/s, fsdp 3.4 GB/s`."""
    return ", ".join(f"{axis} {rate:.3g} GB/s" for axis, rate in rates.items())
