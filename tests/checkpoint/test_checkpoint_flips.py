"""A flipped bit, anywhere in a checkpoint, is found by whoever restores it, on any mesh; a clean one never raises an
alarm."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import CheckpointError
from tests.support.checkpoint_states import assert_same, mesh_of

LAYOUTS = {  # name -> mesh, spec of the large leaves
    "one device": ((1,), ()),
    "data 8": ((8,), ()),
    "fsdp 8": ((8,), ("data",)),
    "data 2 x fsdp 4": ((2, 4), (None, "fsdp")),
    "both dims": ((2, 4), ("fsdp", "data")),
}


def large_state(mesh, spec):
    """Returns some 1.3 MiB of floats that do not compress, and small leaves."""
    rng = np.random.default_rng(0)
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(*spec))
    return {
        "kernel": jax.device_put(rng.standard_normal((512, 512)).astype(np.float32), cut),
        "half": jax.device_put(rng.standard_normal((512, 256)).astype(jnp.bfloat16), cut),
        "bias": jax.device_put(jnp.arange(8.0), whole),
        "step": jax.device_put(jnp.int32(3), whole),
        "rng": jax.device_put(jax.random.key(7), whole),
    }


def abstract_of(state, mesh):
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)


def flip(path, byte, bit):
    with open(path, "r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))


STAMPS = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""What orbax writes after everything else, and nobody reads to restore."""


def places(folder, num, seed):
    """Returns (file, byte, bit): half of them anywhere in the bytes of the arrays, the others in each kind of file in
    turn."""
    rng = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in STAMPS)
    by_size = rng.choices(files, [path.stat().st_size for path in files], k=num - num // 2)
    chosen = [*by_size, *rng.choices(files, k=num // 2)]
    return [(path, rng.randrange(path.stat().st_size), rng.randrange(8)) for path in chosen]


def unnoticed_flips(directory, layout, num, seed=0):
    """Returns the flips of one bit that a restore onto another mesh does not notice."""
    shape, spec = LAYOUTS[layout]
    state = large_state(mesh_of(*shape), spec)
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, state, {"config": "steps: 7", "next_batch": "3f"})
    checkpoints.wait()
    asked, found = abstract_of(state, mesh_of(1 + len(spec))), []
    for path, byte, bit in places(directory / "1", num, seed):
        flip(path, byte, bit)
        try:
            checkpoints.restore(1, asked)
        except CheckpointError as error:
            assert "is damaged" in str(error), error
        else:
            found.append(f"{path.relative_to(directory)} byte {byte} of {path.stat().st_size} bit {bit}")
        flip(path, byte, bit)
    restored, _ = checkpoints.restore(1, asked)
    assert_same(restored, state)
    checkpoints.close()
    return found


@pytest.mark.forms(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_flips_are_detected_on_each_layout(directory, layout):
    assert unnoticed_flips(directory, layout, 20) == []


def test_flips_are_found_in_descriptions_of_any_size(directory):
    """Of 500 leaves orbax's own description has more than 64 KiB, and so have the files that hold copies of the arrays'
    descriptions."""
    whole = NamedSharding(mesh_of(1), PartitionSpec())
    state = {f"a_block_with_a_long_name_{i:04}": jax.device_put(jnp.ones(2), whole) for i in range(500)}
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    files = {path: path.stat().st_size for path in (directory / "1").rglob("*") if path.is_file()}
    large = {path: size for path, size in files.items() if size > 2**16}
    assert "_METADATA" in {path.name for path in large} and len(large) > 5
    for path, size in large.items():
        flip(path, size // 2, 3)
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoints.restore(1, abstract_of(state, mesh_of(1)))
        flip(path, size // 2, 3)
    assert_same(checkpoints.restore(1, abstract_of(state, mesh_of(1)))[0], state)
    checkpoints.close()


def opened(directory, name):
    """Returns an array of step 1 as any reader opens it."""
    import tensorstore as ts

    base = {"driver": "ocdbt", "base": f"file://{directory}/1/state/", "path": f"{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": base}, open=True).result()


def codecs_of(directory, name):
    """Returns the codecs of an array's chunks, as the disk has them."""
    return opened(directory, name).spec().to_json()["metadata"]["codecs"][0]["configuration"]["codecs"][1:]


ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}


@pytest.mark.parametrize(("layout", "large"), [("one device", ["kernel"]), ("fsdp 8", [])])
def test_each_chunk_on_disk_has_a_checksum(directory, layout, large):
    shape, spec = LAYOUTS[layout]
    state = large_state(mesh_of(*shape), spec)
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, state, {})
    checkpoints.close()
    for name in state:
        assert codecs_of(directory, name) == [ZSTD] + [{"name": "crc32c"}] * (name not in large), name
