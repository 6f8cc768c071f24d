"""`HostMemory`: the state of the last steps in host memory, each shard on at least two processes: one may die.

Every `elastic.snapshot_every` steps each process copies its shards from the devices. For leaves with a shard on only
one process (ZeRO, fsdp, tensor), each device also sends its shard to the corresponding device of another process, in
one permutation.

Wire: one shard of these leaves per device, every `snapshot_every` steps; nothing for replicated leaves.
Host memory: two states of the local devices, plus two copies of the received shards. The older state is needed because
the newest may be complete on some processes only.

Source: in-memory checkpoints with a copy on a neighbor (Gemini, SOSP 2023).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import is_key, named_leaves

NUM_SNAPSHOTS = 2
AWAY = 2
"""Distance to the process with the second copy, for four and more: the next one may be killed too (LEAVE_STEP_S)."""

Location = tuple[tuple[int, int], ...]
"""Position of a shard in its leaf: (begin, end) per dim."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The shards of one leaf on this process."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: dict[Location, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The part of a state on this process.

    Attributes:
        record: the content of a checkpoint other than arrays, as JSON.
        leaves: the shards by path.
    """

    step: int
    record: str
    leaves: dict[str, Parts]

    @property
    def num_bytes(self) -> int:
        """The size in host memory."""
        return sum(part.nbytes for leaf in self.leaves.values() for part in leaf.parts.values())


def location_of(index: Any, shape: tuple[int, ...]) -> Location:
    return tuple(dim.indices(size)[:2] for dim, size in zip(index, shape, strict=True))


def size_of(location: Location) -> int:
    return math.prod(end - begin for begin, end in location)


def intersection(one: Location, other: Location) -> Location | None:
    """Returns the overlap of two locations; None if they do not overlap."""
    overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return overlap if all(begin < end for begin, end in overlap) else None


class HostMemory:
    """The snapshots of one process; they remain valid after the backend is closed."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def put(self, snapshot: Snapshot) -> None:
        """Stores a snapshot and drops the oldest; replaces one of the same step."""
        older = [old for old in self.snapshots if old.step != snapshot.step]
        self.snapshots = [*older, snapshot][-NUM_SNAPSHOTS:]


class Copier:
    """Copies states of one program to the host; one per generation.

    `mesh`: the mesh of the states.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        self._mesh = mesh
        self._send: Callable[[list[jax.Array]], list[jax.Array]] | None = None
        self._alone: list[str] = []
        devices = list(mesh.devices.flat)
        self._to = _copied_to(devices)
        self._from: dict[Any, Any] = {devices[there]: devices[here] for here, there in self._to}

    def take(self, step: int, state: Any, record: Mapping[str, Any]) -> Snapshot:
        """Returns the current state on the devices, that of `step`, on the host. Waits for the device. Called on all
        processes. Raises ConfigError if a leaf has typed keys."""
        leaves = {path: _on_device(path, leaf) for path, leaf in named_leaves(state)}
        if self._send is None:
            self._alone = [path for path, leaf in leaves.items() if _is_alone(leaf)]
            self._send = self._sender([leaves[path] for path in self._alone])
        sent = self._send([leaves[path] for path in self._alone]) if self._alone else []
        leaf_parts = {path: _copy_shards(leaf) for path, leaf in leaves.items()}
        for path, leaf in zip(self._alone, sent, strict=True):
            locations = leaves[path].sharding.devices_indices_map(leaf.shape)
            for shard in leaf.addressable_shards:
                location = location_of(locations[self._from[shard.device]], leaf.shape)
                leaf_parts[path].parts.setdefault(location, np.array(shard.data))
        return Snapshot(step, json.dumps(record, allow_nan=False), leaf_parts)

    def _sender(self, leaves: list[jax.Array]) -> Callable[[list[jax.Array]], list[jax.Array]]:
        """Returns the program in which each device sends its shards to the corresponding device of another process."""
        axes = tuple(self._mesh.axis_names)
        specs = [leaf.sharding.spec for leaf in leaves]  # type: ignore[attr-defined]
        shift = lambda shards: [lax.ppermute(x, axes, self._to) for x in shards]
        # Not type-checked: each device receives a different shard than its sharding states, and it is read as such.
        return jax.jit(jax.shard_map(shift, mesh=self._mesh, in_specs=(specs,), out_specs=specs, check_vma=False))


def _copied_to(devices: list[Any]) -> list[tuple[int, int]]:
    """Returns (position, position of the corresponding device on the process with the copy) for all devices of a mesh,
    in mesh order."""
    of = dict[int, list[int]]()
    for position, device in enumerate(devices):
        of.setdefault(device.process_index, []).append(position)
    processes = sorted(of)
    away = AWAY if len(of) > AWAY + 1 else 1
    after = dict(zip(processes, [*processes[away:], *processes[:away]], strict=True))
    return [pair for p in processes for pair in zip(of[p], of[after[p]], strict=True)]


def _is_alone(leaf: jax.Array) -> bool:
    """Returns whether any shard of a leaf is on one process only."""
    holders = dict[Location, set[int]]()
    locations: Mapping[Any, Any] = leaf.sharding.devices_indices_map(leaf.shape)
    for device, index in locations.items():
        holders.setdefault(location_of(index, leaf.shape), set()).add(device.process_index)
    return any(len(processes) == 1 for processes in holders.values())


def _on_device(path: str, leaf: Any) -> jax.Array:
    if is_key(leaf):
        raise ConfigError(
            f"elastic.in_process keeps the state in the memory of its processes, and '{path}' holds typed keys, which "
            "numpy has no form for. Keep jax.random.key_data(key) in the state, or set in_process: false."
        )
    sharding = leaf.sharding
    if sharding.memory_kind not in (None, "device"):
        leaf = jax.device_put(leaf, sharding.with_memory_kind("device"))
    return leaf  # type: ignore[no-any-return]


def _copy_shards(leaf: jax.Array) -> Parts:
    """Returns copies of the shards on this process: the next step reuses the device memory."""
    parts: dict[Location, np.ndarray] = {}
    for shard in leaf.addressable_shards:
        location = location_of(shard.index, leaf.shape)
        if location not in parts:
            parts[location] = np.array(shard.data)
    return Parts(leaf.shape, np.dtype(leaf.dtype), parts)


class SnapshotReader:
    """A snapshot with the interface of `Checkpoints`, for `program.restore.restored`."""

    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot

    def read_tree(self, step: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns `{path: (shape, dtype name)}`."""
        return {path: (leaf.shape, str(leaf.dtype)) for path, leaf in self._snapshot.leaves.items()}

    def restore(self, step: int, abstract_state: Any, optional: Any = ()) -> tuple[Any, dict[str, Any]]:
        """Returns (state, record), each leaf with the requested sharding."""
        leaves = self._snapshot.leaves
        restored = [
            jax.make_array_from_callback(leaves[path].shape, target.sharding, functools.partial(whole, leaves[path]))
            for path, target in named_leaves(abstract_state)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), restored), json.loads(self._snapshot.record)


def whole(leaf: Parts, index: Any) -> np.ndarray:
    """Returns the elements at a tuple of slices, assembled from the parts that overlap with it."""
    requested = location_of(index, leaf.shape)
    if requested in leaf.parts:
        return leaf.parts[requested]
    out = np.empty([end - begin for begin, end in requested], leaf.dtype)
    within: Callable[[Any, Any], tuple[slice, ...]] = lambda inner, outer: tuple(
        slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True)
    )
    for location, part in leaf.parts.items():
        if (overlap := intersection(location, requested)) is not None:
            out[within(overlap, requested)] = part[within(overlap, location)]
    return out
