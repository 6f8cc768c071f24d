"""Sends each process of a new generation the shards of the state that it needs and does not have.

All processes describe their snapshots (step, leaves, shards). The newest step with a complete set of shards is
selected. The shards that any process needs on the new mesh and does not have form a byte stream, the same on all
processes. The first holder of a shard writes it, all others write zeros, and an all-reduce sums the streams, which is
exact for integers. If no shard is missing (a replica died, no new process), nothing is sent.

Wire: an all-reduce of the missing shards, in pieces of `PIECE_BYTES`; one program for all shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from spmdkit.cluster import Cluster
from spmdkit.elastic.peer_memory import HostMemory, Location, Parts, Snapshot, intersection, location_of, size_of
from spmdkit.foundation.trees import named_leaves

PIECE_BYTES = 1 << 22

Holdings = dict[str, list[Location]]
"""Path of a leaf -> locations of its shards on one process."""


@dataclasses.dataclass(frozen=True)
class SnapshotInfo:
    """The description of one snapshot of one process."""

    step: int
    leaves: dict[str, tuple[tuple[int, ...], str]]
    holdings: Holdings


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the description of a snapshot, as JSON values."""
    return {
        "step": snapshot.step,
        "leaves": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in snapshot.leaves.items()},
        "holdings": {
            path: [list(map(list, location)) for location in leaf.parts] for path, leaf in snapshot.leaves.items()
        },
    }


def parse_info(value: Mapping[str, Any]) -> SnapshotInfo:
    """Parses the result of `describe`."""
    holdings = {
        path: [tuple((a, b) for a, b in location) for location in locations]
        for path, locations in value["holdings"].items()
    }
    leaves = {path: (tuple(shape), dtype) for path, (shape, dtype) in value["leaves"].items()}
    return SnapshotInfo(value["step"], leaves, holdings)


def newest_whole(by_process: list[list[SnapshotInfo]]) -> int | None:
    """Returns the newest step with every element of every leaf on some process."""
    infos = [info for of_one in by_process for info in of_one]
    for step in sorted({info.step for info in infos}, reverse=True):
        of_step = [info for info in infos if info.step == step]
        if all(
            sum(map(size_of, {location for info in of_step for location in info.holdings[path]}))
            == int(np.prod(shape, dtype=np.int64))
            for path, (shape, _) in of_step[0].leaves.items()
        ):
            return step
    return None


def find_newest(cluster: Cluster, memory: HostMemory, least: int) -> tuple[int, list[SnapshotInfo | None]] | None:
    """Returns (step, the shards of each process) of the newest state that is complete across processes; None if there
    is none or it is older than `least`."""
    gathered = cluster.gather("memory", [describe(snapshot) for snapshot in memory.snapshots])
    by_process = [[parse_info(value) for value in values] for values in gathered]
    step = newest_whole(by_process)
    if step is None or step < least:
        return None
    return step, [next((info for info in of_one if info.step == step), None) for of_one in by_process]


def complete_snapshot(
    cluster: Cluster, memory: HostMemory, step: int, holders: list[SnapshotInfo | None], abstract_state: Any
) -> Snapshot:
    """Returns the snapshot of `step` with all shards that this process needs on the new mesh, received from other
    processes if missing. Called on all processes."""
    first, leaves = next((i, each.leaves) for i, each in enumerate(holders) if each is not None)
    mine = next((each for each in memory.snapshots if each.step == step), None)
    if cluster.process_index == first:
        assert mine is not None
        cluster.put("memory's record", mine.record)
    record = cluster.get("memory's record")
    if mine is None:
        nothing = {path: Parts(shape, np.dtype(jnp.dtype(dtype)), {}) for path, (shape, dtype) in leaves.items()}
        mine = Snapshot(step, record, nothing)
    needed = _required_shards(cluster.num_processes, leaves, abstract_state)
    stream = list(_missing_shards(holders, needed, leaves))
    parts = {path: dict(leaf.parts) for path, leaf in mine.leaves.items()}
    for (path, location), part in (_receive(cluster, mine, stream) if stream else {}).items():
        parts[path][location] = part
    return Snapshot(step, record, {p: dataclasses.replace(leaf, parts=parts[p]) for p, leaf in mine.leaves.items()})


def _required_shards(num: int, leaves: Mapping[str, Any], abstract_state: Any) -> list[Holdings]:
    needed: list[Holdings] = [{path: [] for path in leaves} for _ in range(num)]
    targets = dict(named_leaves(abstract_state))
    for path, (shape, _) in leaves.items():
        target = targets.get(path)
        if target is None or tuple(target.shape) != shape:  # other number of replicas: a restore reads all
            for of_process in needed:
                of_process[path].append(tuple((0, size) for size in shape))
            continue
        for device, index in target.sharding.devices_indices_map(shape).items():
            location = location_of(index, shape)
            if location not in needed[device.process_index][path]:
                needed[device.process_index][path].append(location)
    return needed


def _missing_shards(
    holders: list[SnapshotInfo | None], needed: list[Holdings], leaves: Mapping[str, Any]
) -> Iterator[tuple[str, Location, int, frozenset[int]]]:
    """Yields (path, location, sender, receivers) of each missing shard, in the same order on all processes."""
    for path in leaves:
        has = [set[Location]() if info is None else set(info.holdings[path]) for info in holders]
        for location in sorted(set().union(*has)):
            receivers = {
                p
                for p, wants in enumerate(needed)
                if location not in has[p] and any(intersection(location, wanted) is not None for wanted in wants[path])
            }
            if receivers:
                yield (
                    path,
                    location,
                    next(p for p, locations in enumerate(has) if location in locations),
                    frozenset(receivers),
                )


def _receive(
    cluster: Cluster, mine: Snapshot, stream: list[tuple[str, Location, int, frozenset[int]]]
) -> dict[tuple[str, Location], np.ndarray]:
    """Returns (path, location) -> shard, for the shards that this process receives."""
    sizes = [size_of(location) * mine.leaves[path].dtype.itemsize for path, location, _, _ in stream]
    starts = [int(start) for start in np.cumsum([0, *sizes])]
    piece = min(PIECE_BYTES, starts[-1])
    total = np.zeros(-(-starts[-1] // piece) * piece, np.uint8)
    for start, size, (path, location, sender, _) in zip(starts, sizes, stream, strict=False):
        if sender == cluster.process_index:
            shard = np.ascontiguousarray(mine.leaves[path].parts[location])
            total[start : start + size] = shard.reshape(-1).view(np.uint8)
    for at in range(0, len(total), piece):
        # With `is_source` on every process this is a sum: each position is nonzero on at most one process.
        total[at : at + piece] = multihost_utils.broadcast_one_to_all(total[at : at + piece], is_source=True)
    received = {}
    for start, size, (path, location, _, receivers) in zip(starts, sizes, stream, strict=False):
        if cluster.process_index in receivers:
            part = total[start : start + size].copy().view(mine.leaves[path].dtype)
            received[path, location] = part.reshape([end - begin for begin, end in location])
    return received
