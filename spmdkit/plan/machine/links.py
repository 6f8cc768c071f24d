"""The link that connects a group of devices, its bandwidth for the group, and the time of a collective on it.

    time = bytes that one device sends / bytes per second of its link + hops x latency

The bytes are those of the bill (ring algorithms). The link depends on the positions of the group's devices:

| machine | group | bytes per second of one device |
| --- | --- | --- |
| TPU | inside a slice | per ICI axis that it spans: two links if the axis is a ring, else one |
| TPU | across slices | the device's share of the data centre's network, times the group's devices in a slice |
| GPU | inside a host | NVLink |
| GPU | across hosts | one network port for each of the group's devices in a host, at most NVLink |
| CPU | anything | the machine's memory; processes on several hosts are not distinguished |

A part of an ICI axis is a line, not a ring. Contention between groups that share links is not modelled.

Source: "How to Scale Your Model", chapters on TPUs, GPUs and sharded matrices (jax-ml.github.io/scaling-book).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.machine.target import Target


@dataclass(frozen=True)
class LinkPath:
    """The connection between the devices of a group.

    Attributes:
        link: name of the slowest link that a byte crosses: `ici`, `dcn`, `nvlink`, `network`, `cpu`, `on chip`.
        bytes_per_s: peak send rate of one device.
        efficiency: share of the peak that is reached.
        latency_s: of one hop.
        crosses: whether the group spans several hosts (GPU) or slices (TPU).
        channels: the links that are busy meanwhile: both directions of dims of the torus (for a permutation, one),
            NVLink, the network. Collectives that share none run concurrently.
    """

    link: str
    bytes_per_s: float
    efficiency: float
    latency_s: float
    crosses: bool = False
    channels: tuple[str, ...] = ()

    def seconds(self, num_bytes: float, op: str, group_size: int, runs: int = 1) -> float:
        """Returns the time of a collective from the bytes that one device sends (all `runs` together)."""
        return num_bytes / (self.bytes_per_s * self.efficiency) + runs * hops(op, group_size) * self.latency_s


def hops(op: str, group_size: int) -> int:
    """Returns the steps of a bidirectional ring: (N-1)/2, twice that for an all_reduce; one for a permutation."""
    if op == "collective_permute":
        return 1
    steps = max(1, math.ceil((group_size - 1) / 2))
    return 2 * steps if op == "all_reduce" else steps


def link_path(target: Target, devices: Sequence[Any], group: Sequence[int]) -> LinkPath:
    """Returns the connection of the devices of a group; `group` are positions in the flattened mesh `devices`."""
    if target.chip.kind == "tpu":
        return _torus(target, [devices[i] for i in group])
    return _hosts(target, group)


def link_path_of(target: Target, devices: Sequence[Any], collective: Collective) -> LinkPath:
    """Returns the connection of a collective: that of its first group, for a permutation that of its slowest pair."""
    groups = collective.groups or ((0,),)
    if collective.op != "collective_permute":
        return link_path(target, devices, groups[0])
    path, pair = min(((link_path(target, devices, g), g) for g in groups), key=lambda found: found[0].bytes_per_s)
    return replace(path, channels=_one_way(target, [devices[i] for i in pair])) if path.link == "ici" else path


def _one_way(target: Target, pair: Sequence[Any]) -> tuple[str, ...]:
    """Returns the channels of a transfer between two devices of a slice: one direction of each dim that it crosses."""
    channels = []
    for axis, length in enumerate(target.topology):
        a, b = (device.coords[axis] for device in pair)
        step = (b - a) % length
        if step:
            is_shorter = 2 * step < length or (2 * step == length and b > a)
            forth = is_shorter if target.rings[axis] else b > a
            channels.append(f"{target.chip.inner.name} {axis}{'+' if forth else '-'}")
    return tuple(channels)


def parts_of(target: Target, devices: Sequence[Any]) -> list[int]:
    """Returns the host (GPU) or slice of each device of the flattened mesh."""
    if target.chip.kind == "gpu":
        return [place // target.chip.devices_per_host for place in range(len(devices))]
    return [int(getattr(device, "slice_index", 0) or 0) for device in devices]


def crossing_axes(target: Target, mesh: Mesh) -> set[str]:
    """Returns the mesh axes along which some devices are on different hosts or slices."""
    parts = np.array(parts_of(target, list(mesh.devices.flat))).reshape(mesh.devices.shape)
    return {axis for n, axis in enumerate(mesh.axis_names) if (parts != parts.take([0], axis=n)).any()}


def _hosts(target: Target, group: Sequence[int]) -> LinkPath:
    chip = target.chip
    per_host = Counter(place // chip.devices_per_host for place in group)
    if len(per_host) == 1 or chip.kind == "cpu":
        inner = chip.inner
        return LinkPath(inner.name, inner.bytes_per_s, chip.efficiency.link, inner.latency_s, False, (inner.name,))
    rate = min(chip.inner.bytes_per_s, chip.outer.bytes_per_s * min(per_host.values()))
    channels = (chip.outer.name, chip.inner.name) if min(per_host.values()) > 1 else (chip.outer.name,)
    return LinkPath(chip.outer.name, rate, chip.efficiency.link, chip.outer.latency_s, True, channels)


def _torus(target: Target, members: Sequence[Any]) -> LinkPath:
    chip = target.chip
    slices = Counter(getattr(device, "slice_index", 0) or 0 for device in members)
    if len(slices) > 1:
        outer = chip.outer
        rate = min(outer.bytes_per_s * min(slices.values()), 2 * chip.torus_dims * chip.inner.bytes_per_s)
        return LinkPath(outer.name, rate, chip.efficiency.link, outer.latency_s, True, (outer.name,))
    rate, channels = 0.0, []
    for axis in range(chip.torus_dims):
        num = len({device.coords[axis] for device in members})
        if num > 1:
            channels += [f"{chip.inner.name} {axis}+", f"{chip.inner.name} {axis}-"]
            is_ring = target.rings[axis] and num == target.topology[axis]
            rate += chip.inner.bytes_per_s * (2 if is_ring else 1)
    if not rate:  # the two devices of one chip
        latency_s = chip.inner.latency_s / 10
        return LinkPath("on chip", chip.memory_bytes_per_s, chip.efficiency.memory, latency_s, False, ("on chip",))
    return LinkPath(chip.inner.name, rate, chip.efficiency.link, chip.inner.latency_s, False, tuple(channels))
