"""What each process of a new generation lacks of the state, it gets from those that have it.

All say what they hold (step, leaves, shards). The newest step of which every shard is somewhere is taken. Shards that
some process needs on the new mesh and does not hold are put one after the other into a stream of bytes, the same for
all; whoever is the first to hold one writes it, everybody else zeros, and the streams are added up: integers, so exact.
Where no process lacks anything (a death among replicas, no new process) nothing is sent.

Wire: an all-reduce of the shards that are lacking, in pieces of `PIECE_BYTES`; one program whatever the shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit.cluster import Cluster
from spmdkit.elastic.peer_memory import HostMemory, Location, Parts, Snapshot, common, place_of, size_of
from spmdkit.foundation.trees import named_leaves

PIECE_BYTES = 1 << 22

Holdings = dict[str, list[Location]]
"""Path of a leaf -> the places that one process holds of it."""


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
        "holdings": {path: [list(map(list, place)) for place in leaf.parts] for path, leaf in snapshot.leaves.items()},
    }


def parse_info(value: Mapping[str, Any]) -> SnapshotInfo:
    """Returns the result of `describe`, parsed."""
    holdings = {
        path: [tuple((a, b) for a, b in place) for place in places] for path, places in value["holdings"].items()
    }
    leaves = {path: (tuple(shape), dtype) for path, (shape, dtype) in value["leaves"].items()}
    return SnapshotInfo(value["step"], leaves, holdings)


def newest_whole(by_process: list[list[SnapshotInfo]]) -> int | None:
    """Returns the newest step of which every element of every leaf is somewhere."""
    everything = [each for of_one in by_process for each in of_one]
    for step in sorted({each.step for each in everything}, reverse=True):
        of_step = [each for each in everything if each.step == step]
        if all(
            sum(map(size_of, {place for each in of_step for place in each.holdings[path]}))
            == int(np.prod(shape, dtype=np.int64))
            for path, (shape, _) in of_step[0].leaves.items()
        ):
            return step
    return None


def found(cluster: Cluster, memory: HostMemory, least: int) -> tuple[int, list[SnapshotInfo | None]] | None:
    """Returns (step, what each process holds of it) of the newest state that the processes have together, None where it
    is older than `least` or there is none."""
    gathered = cluster.gather("memory", [describe(snapshot) for snapshot in memory.kept])
    by_process = [[parse_info(value) for value in values] for values in gathered]
    step = newest_whole(by_process)
    if step is None or step < least:
        return None
    return step, [next((each for each in of_one if each.step == step), None) for of_one in by_process]


def completed(
    cluster: Cluster, memory: HostMemory, step: int, holders: list[SnapshotInfo | None], abstract_state: Any
) -> Snapshot:
    """Returns the snapshot of `step` with everything that this process needs on the new mesh, received from the others
    where it lacks it. On all processes."""
    first = next(i for i, each in enumerate(holders) if each is not None)
    leaves = holders[first].leaves  # type: ignore[union-attr]
    mine = next((each for each in memory.kept if each.step == step), None)
    if cluster.process_index == first:
        assert mine is not None
        cluster.put("memory's record", mine.record)
    record = cluster.get("memory's record")
    if mine is None:
        mine = Snapshot(
            step, record, {path: Parts(shape, _dtype(dtype), {}) for path, (shape, dtype) in leaves.items()}
        )
    needed = _needed(cluster.num_processes, leaves, abstract_state)
    stream = list(_lacking(holders, needed, leaves))
    wants = {path for path, _, _, wanting in stream if cluster.process_index in wanting}
    pieces = _received(cluster, mine, stream) if stream else {}
    got = {
        path: dataclasses.replace(
            leaf, parts={**leaf.parts, **{place: part for (p, place), part in pieces.items() if p == path}}
        )
        if path in wants
        else leaf
        for path, leaf in mine.leaves.items()
    }
    return Snapshot(step, record, got)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(jax.numpy.dtype(name))


def _needed(num: int, leaves: Mapping[str, Any], abstract_state: Any) -> list[Holdings]:
    """Returns what each process needs of each leaf."""
    needed: list[Holdings] = [{path: [] for path in leaves} for _ in range(num)]
    for path, target in named_leaves(abstract_state):
        if path not in leaves:
            continue
        shape = leaves[path][0]
        if tuple(target.shape) != shape:  # copies of another number of replicas: whoever restores reads all of them
            for each in needed:
                each[path].append(tuple((0, size) for size in shape))
            continue
        for device, index in target.sharding.devices_indices_map(shape).items():
            place = place_of(index, shape)
            if place not in needed[device.process_index][path]:
                needed[device.process_index][path].append(place)
    for path in leaves.keys() - {path for path, _ in named_leaves(abstract_state)}:
        for each in needed:
            each[path].append(tuple((0, size) for size in leaves[path][0]))
    return needed


def _lacking(
    holders: list[SnapshotInfo | None], needed: list[Holdings], leaves: Mapping[str, Any]
) -> Iterator[tuple[str, Location, int, frozenset[int]]]:
    """Yields (path, place, who sends it, who lacks it) of each shard that somebody lacks, in an order that all have."""
    for path in leaves:
        has = [set[Location]() if each is None else set(each.holdings[path]) for each in holders]
        for place in sorted(set().union(*has)):
            wanting = {
                p
                for p, wants in enumerate(needed)
                if place not in has[p] and any(common(place, wanted) is not None for wanted in wants[path])
            }
            if wanting:
                yield path, place, next(p for p, places in enumerate(has) if place in places), frozenset(wanting)


def _received(
    cluster: Cluster, mine: Snapshot, stream: list[tuple[str, Location, int, frozenset[int]]]
) -> dict[tuple[str, Location], np.ndarray]:
    """Returns (path, place) -> the shard, for those that this process lacks."""
    sizes = [size_of(place) * mine.leaves[path].dtype.itemsize for path, place, _, _ in stream]
    total = sum(sizes)
    piece = min(PIECE_BYTES, -(-total // 4) * 4)
    add = _adder(cluster, piece)
    out, at = dict[tuple[str, Location], np.ndarray](), 0
    buffers = [
        np.empty(size, np.uint8) if cluster.process_index in wanting else None
        for size, (_, _, _, wanting) in zip(sizes, stream, strict=True)
    ]
    starts = np.cumsum([0, *sizes])
    while at < total:
        mine_now = np.zeros(piece, np.uint8)
        here = [i for i in range(len(stream)) if starts[i] < at + piece and starts[i + 1] > at]
        spans = {i: (max(int(starts[i]), at), min(int(starts[i + 1]), at + piece)) for i in here}
        for i, (begin, end) in spans.items():
            path, place, sender, _ = stream[i]
            if sender == cluster.process_index:
                flat = np.ascontiguousarray(mine.leaves[path].parts[place]).reshape(-1).view(np.uint8)
                mine_now[begin - at : end - at] = flat[begin - int(starts[i]) : end - int(starts[i])]
        summed = add(mine_now)
        for i, (begin, end) in spans.items():
            if (buffer := buffers[i]) is not None:
                buffer[begin - int(starts[i]) : end - int(starts[i])] = summed[begin - at : end - at]
        at += piece
    for buffer, (path, place, _, _) in zip(buffers, stream, strict=True):
        if buffer is not None:
            shape = [end - begin for begin, end in place]
            out[path, place] = buffer.view(mine.leaves[path].dtype).reshape(shape)
    return out


def _adder(cluster: Cluster, piece: int) -> Any:
    """Returns uint8[piece] -> the sum of those of all processes, of which one alone is not zero at each place."""
    mesh = Mesh(np.array(cluster.devices), ("all",))
    cut, whole = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())
    own = [d for d in cluster.devices if d.process_index == cluster.process_index]
    add = jax.jit(lambda x: jax.numpy.sum(x, 0, dtype=np.uint32), out_shardings=whole)
    shape = (len(cluster.devices), piece // 4)

    def run(mine: np.ndarray) -> np.ndarray:
        words, nothing = mine.view(np.uint32)[None], np.zeros((1, piece // 4), np.uint32)
        shards = [jax.device_put(words if i == 0 else nothing, device) for i, device in enumerate(own)]
        summed = add(jax.make_array_from_single_device_arrays(shape, cut, shards))
        return np.array(summed.addressable_data(0)).view(np.uint8)

    return run
