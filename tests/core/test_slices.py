"""Several TPU slices: `replica` is their number by default, and the mesh has a slice at each place along it."""

import dataclasses

import numpy as np
import pytest

from spmdkit.foundation.constants import AXES
from spmdkit.mesh import mesh
from tests.support.messages import raises


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX's mesh_utils looks at of a device of a v5e 2x2 slice."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0


CHIPS = [Chip(4 * s + i, (i % 2, i // 2, 0), s, s) for s in range(2) for i in range(4)]


def sizes(asked, num_devices=8, num_slices=2):
    return {axis: size for axis, size in mesh.resolve(asked, num_devices, num_slices).items() if size > 1}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"data": -1}, {"replica": 2, "data": 4}),
        ({"fsdp": 4}, {"replica": 2, "fsdp": 4}),  # 4 of 8 devices would be refused on one slice
        ({"data": -1, "tensor": 2}, {"replica": 2, "data": 2, "tensor": 2}),
        ({"fsdp": 8}, {"fsdp": 8}),  # all are asked for: no room
        ({"replica": 1, "data": -1}, {"data": 8}),  # the config says otherwise
        ({"replica": 4, "data": -1}, {"replica": 4, "data": 2}),
        ({}, {}),
    ],
)
def test_replica_is_the_number_of_slices(asked, found):
    assert sizes(asked) == found
    assert sizes({"data": -1}, num_slices=1) == {"data": 8}


def test_slices_are_counted_on_tpus_alone():
    assert mesh.slices(CHIPS) == 2 and mesh.slices(CHIPS[:4]) == 1 and mesh.slices([]) == 1
    assert mesh.slices([dataclasses.replace(chip, platform="cuda") for chip in CHIPS]) == 1


def test_each_place_along_replica_is_one_slice(monkeypatch):
    monkeypatch.setattr(mesh.compat, "auto_mesh", lambda devices, axes: devices)
    shuffled = [CHIPS[i] for i in (5, 0, 3, 6, 1, 7, 2, 4)]
    found = mesh.make_mesh(mesh.resolve({"fsdp": 4}, 8, mesh.slices(shuffled)), shuffled)
    assert found.shape == tuple({"replica": 2, "fsdp": 4}.get(axis, 1) for axis in AXES)
    for place, devices in enumerate(np.reshape(found, (2, 4))):
        assert {device.slice_index for device in devices} == {place}


def test_one_device_is_no_mesh_of_several_processes():
    with raises("mesh is one device", found="8 devices in 2 processes", repair="mesh: {data: -1}"):
        mesh.check_processes({}, CHIPS)
    mesh.check_processes({}, CHIPS[:4])
    mesh.check_processes({"data": 8}, CHIPS)
