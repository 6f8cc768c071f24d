"""Compares the replicas of the train state bitwise, finds the outlier, and repairs it from the majority.

    hash[device, leaf] = checksum of the device's shard of the leaf            spmdkit.foundation.checksum, 64 bits
    copies             = devices with the same shard: equal positions along the axes that shard the leaf

    three or more   the majority is correct; the outlier is reported
    two             either may be correct; an audit decides: the same inputs twice on each device, compared bitwise
    one             no copy to compare with (fsdp with zero: 3)

Wire: one all_gather of 8 bytes per leaf and device. Repair of a leaf: one all_reduce of it over its copies.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.communication.reducers.base import Reducer, stateless
from spmdkit.foundation.checksum import shard_lanes
from spmdkit.foundation.trees import dtype_bits, is_key, path_name
from spmdkit.mesh.layout import LeafPlacement
from spmdkit.mesh.mesh import spec_axes
from spmdkit.program.program import Program
from spmdkit.program.state_layout import to_device
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch


class Difference(NamedTuple):
    """Copies of one shard of a leaf that differ.

    Attributes:
        leaf, path: index of the leaf in flattening order, and its path.
        odd: mesh positions, in row-major order, of the devices outside of the majority; all if there is no majority.
        source: mesh position of a device in the majority; None if there is no majority.
        num: number of copies.
    """

    leaf: int
    path: str
    outliers: tuple[int, ...]
    source: int | None
    num: int


class Copies:
    """The copies of a train state on the mesh of a program."""

    def __init__(self, program: Program):
        self._program, self._mesh = program, program.mesh
        self._axes = tuple(program.mesh.axis_names)
        self._shape = tuple(program.mesh.shape[a] for a in self._axes)
        self._table: Sequence[LeafPlacement] = program.layout
        self._specs: Any = jax.tree.map(lambda x: x.spec, program.state_sharding)
        self._paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(program.abstract_state)]

    def axes_of(self, leaf: int) -> tuple[str, ...]:
        """Returns the mesh axes larger than one along which a leaf is replicated."""
        sharding_axes = set(spec_axes(self._table[leaf].spec))
        return tuple(a for a, size in zip(self._axes, self._shape, strict=True) if size > 1 and a not in sharding_axes)

    def without(self) -> list[str]:
        """Returns the paths of leaves that have no second copy of any shard."""
        return [path for i, path in enumerate(self._paths) if not self.axes_of(i)]

    # ---- comparison

    @functools.cached_property
    def _hash(self) -> Any:
        def own(state: TrainState) -> jax.Array:
            return jnp.stack([shard_lanes(x, (0,) * x.ndim, x.shape) for x in jax.tree.leaves(state)])[None]

        hashes = self._on_shards(own, PartitionSpec(self._axes))
        return jax.jit(hashes, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def _on_shards(self, fn: Callable[..., Any], out_specs: Any) -> Callable[[TrainState], Any]:
        """Returns the function of a state that runs `fn` on each device's shard of it."""
        specs = (self._specs,)
        mapped = jax.shard_map(fn, mesh=self._mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return lambda state: mapped(to_device(self._table, self._mesh, state))

    def hashes(self, state: TrainState) -> np.ndarray:
        """Returns uint32[devices, leaves, 2], the same on every process. Waits for the devices."""
        return np.asarray(jax.device_get(self._hash(state)))

    def differences(self, hashes: np.ndarray) -> list[Difference]:
        """Returns the copies that differ."""
        found = []
        for leaf, path in enumerate(self._paths):
            for group in self._groups(leaf):
                values = [tuple(hashes[position, leaf]) for position in group]
                (most, count), *minority = collections.Counter(values).most_common()
                if not minority:
                    continue
                known = 2 * count > len(group)
                outliers = tuple(int(p) for p, value in zip(group, values, strict=True) if not known or value != most)
                source = int(group[values.index(most)]) if known else None
                found.append(Difference(leaf, path, outliers, source, len(group)))
        return found

    def _groups(self, leaf: int) -> np.ndarray:
        """Returns [shards, copies], the mesh positions of the devices that hold each shard of a leaf."""
        axes = [self._axes.index(a) for a in self.axes_of(leaf)]
        rest = [i for i in range(len(self._shape)) if i not in axes]
        positions = np.arange(math.prod(self._shape)).reshape(self._shape)
        return positions.transpose(*rest, *axes).reshape(-1, math.prod(self._shape[i] for i in axes))

    def device(self, place: int) -> jax.Device:
        """Returns the device at a mesh position."""
        return self._mesh.devices.reshape(-1)[place]

    # ---- repair

    def repaired(self, state: TrainState, differences: Sequence[Difference]) -> TrainState:
        """Returns the state in which every differing copy has the bytes of its source. The input state is donated.

        Every difference must have a source.
        """
        sources = {leaf: np.zeros(math.prod(self._shape), np.int32) for leaf in sorted({d.leaf for d in differences})}
        for leaf, source in sources.items():
            for group in self._groups(leaf):
                known = [d.source for d in differences if d.leaf == leaf and d.outliers[0] in group]
                source[group] = known[0] if known else group[0]

        def repair(state: TrainState) -> TrainState:
            position = lax.axis_index(self._axes)
            flat, structure = jax.tree.flatten(state)
            for leaf, source in sources.items():
                flat[leaf] = _of_source(flat[leaf], jnp.asarray(source)[position] == position, self.axes_of(leaf))
            repaired: TrainState = jax.tree.unflatten(structure, flat)
            return repaired

        on_shards = self._on_shards(repair, self._specs)
        repaired: TrainState = jax.jit(on_shards, out_shardings=self._program.state_sharding, donate_argnums=0)(state)
        return repaired

    # ---- the audit

    def audit(self, state: TrainState, batch: Batch) -> list[int]:
        """Returns the positions of the devices with different results for the same inputs. The state does not change.

        In the manual form the audit reduces no gradient over replicas, so each result depends on one device only.
        """
        copy = jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=self._program.state_sharding)
        step = self._audit_step
        first, second = (self.hashes(step(copy(state), batch)[0]) for _ in range(2))
        return [int(position) for position in np.flatnonzero((first != second).any(axis=(1, 2)))]

    @functools.cached_property
    def _audit_step(self) -> Any:
        program = self._program
        if program.form != "manual" or program.task.is_manual or program.reducer.init is not stateless:
            return program.compiled
        nothing = Reducer(exact=True, apply=lambda own, states, over: (own, states), wire=lambda values, replicas: 0)
        return program.compiled_by(nothing)


def _of_source(x: jax.Array, is_source: jax.Array, axes: tuple[str, ...]) -> Any:
    """Returns the bytes of the copy for which `is_source` is true, on all copies along `axes`."""
    if is_key(x):
        data = _of_source(jax.random.key_data(x), is_source, axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(*(_of_source(part, is_source, axes) for part in (x.real, x.imag)))
    if dtype_bits(x.dtype) == 4:  # sent as bytes: XLA:CPU adds no uint4 over devices
        data = _of_source(x.view("uint4").astype("uint8"), is_source, axes)
        return data.astype("uint4").view(x.dtype)
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    return lax.psum(jnp.where(is_source, bits, jnp.zeros_like(bits)), axes).view(x.dtype)
