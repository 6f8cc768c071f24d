"""The device mesh: its axes, their sizes, and the position of each device.

Replica axes (`replica` between hosts or slices, `data`) divide the work: each replica computes the gradient of its
examples, and a reducer reduces them. Model axes (`fsdp`, `expert`, `context`, `tensor`, `pipeline`) shard the arrays:
the XLA partitioner follows the layout. Every mesh has all axes, including those of size one, so that their names are
always bound and one program works on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import AXES as AXES
from spmdkit.foundation.constants import BATCH_AXES as BATCH_AXES
from spmdkit.foundation.constants import MODEL_AXES as MODEL_AXES
from spmdkit.foundation.constants import REPLICA_AXES as REPLICA_AXES
from spmdkit.foundation.formatting import shown


def resolve(requested: Mapping[str, int], num_devices: int, num_slices: int = 1) -> dict[str, int]:
    """Returns the size of every axis in `AXES`. A size of -1 in `requested` takes the remaining part of `num_devices`.

    An empty `requested` is one device, the debugging default. If devices are in several slices and `replica` is not
    set, it is the number of slices if the other sizes permit: this axis is for the slowest links, those between slices.

    Raises:
        ConfigError: the product of the sizes is not the number of devices.
    """
    sizes = {axis: requested.get(axis, 1) for axis in AXES}
    if not requested:
        return sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    room = num_devices % (fixed * num_slices) == 0 if -1 in sizes.values() else fixed * num_slices == num_devices
    if num_slices > 1 and "replica" not in requested and room:
        return resolve({**requested, "replica": num_slices}, num_devices)
    named = " x ".join(f"{shown(axis)}({size})" for axis, size in requested.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"mesh has {named}: two axes are -1. At most one -1 can fill. Give one of them a number.")
    if open_axes:
        if num_devices % fixed:
            raise ConfigError(
                f"mesh has {named}, found {num_devices} devices: {fixed} does not divide {num_devices}. The axis that "
                f"is -1 fills the rest. {_repair(requested, fixed, num_devices)}"
            )
        sizes[open_axes[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise ConfigError(
            f"mesh needs {named} = {fixed} devices, found {num_devices}. "
            f"The product must equal the device count. {_repair(requested, fixed, num_devices)}"
        )
    return sizes


def check_processes(requested: Mapping[str, int], devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError if the mesh is one device, the default, and the devices are of several processes."""
    processes = {device.process_index for device in devices}
    if not requested and len(processes) > 1:
        raise ConfigError(
            f"mesh is one device, the default, found {len(devices)} devices in {len(processes)} processes. Each "
            f"process of a job computes a part. Set mesh: {{data: -1}}, which uses all devices, or start one process."
        )


def _repair(requested: Mapping[str, int], fixed: int, num_devices: int) -> str:
    """Returns the smallest change of one axis that makes the product fit."""
    for axis, size in sorted(requested.items(), key=lambda item: -item[1]):
        if size == -1:
            continue
        rest = fixed // size
        if num_devices % rest == 0 and num_devices // rest != size and -1 not in requested.values():
            return f"Try {axis}: {num_devices // rest}, or {axis}: -1 to fill."
        fits = [s for s in range(1, size) if num_devices % (rest * s) == 0]
        if fits and -1 in requested.values():
            return f"Try {shown(axis)}: {fits[-1]}."
    return f"Try {shown('data')}: -1 alone, which uses all of them."


def slices(devices: Sequence[jax.Device]) -> int:
    """Returns the number of TPU slices of the devices; 1 for all other platforms. (On GPUs the slice index is that of
    the host or NVLink domain.)"""
    if not devices or devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in devices})


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """Returns the mesh of `sizes` over the first devices, arranged by the machine's links if JAX knows them."""
    shape = tuple(sizes[axis] for axis in AXES)
    return compat.auto_mesh(_arrange(shape, list(devices)[: math.prod(shape)]), AXES)


def _arrange(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    if devices[0].platform != "tpu" or len(devices) == 1:
        return np.array(devices).reshape(shape)
    from jax.experimental import mesh_utils

    num_slices = slices(devices)
    if num_slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    for i, size in enumerate(shape):
        if size % num_slices == 0:
            outer = [num_slices if j == i else 1 for j in range(len(shape))]
            inner = [*shape[:i], size // num_slices, *shape[i + 1 :]]
            return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    raise ConfigError(
        f"mesh {dict(zip(AXES, shape, strict=True))} on {num_slices} slices: no axis is divisible by {num_slices}. "
        f"One axis has to cross the slices. Try replica: {num_slices}."
    )


def dim_axes(dim: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a `PartitionSpec`."""
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


def spec_axes(spec: Iterable[Any]) -> tuple[str, ...]:
    """Returns the mesh axes of a `PartitionSpec`."""
    return tuple(axis for dim in spec for axis in dim_axes(dim))


def canonical(spec: Sequence[str | tuple[str, ...] | None], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the canonical form of a spec: without axes of size one, trailing None, and tuples of length one.

    Two forms of the same sharding are two entries in JAX's cache, and the second step would compile again.
    """
    dims: list[str | tuple[str, ...] | None] = []
    for dim in spec:
        axes = tuple(a for a in dim_axes(dim) if sizes[a] > 1)
        dims.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def count(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    """Returns the number of positions along `axes`, the product of their sizes."""
    return math.prod(sizes[axis] for axis in axes)


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """Returns `data 4 x fsdp 2`, or `one device`."""
    return " x ".join(f"{shown(axis)} {size}" for axis, size in sizes.items() if size > 1) or "one device"
