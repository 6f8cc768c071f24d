"""A leaf's checksum: as the numpy reference says it, the same on every mesh, other after any change."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit.foundation.checksum import as_int, checksums, inner_dims_from, leaf_lanes, shard_lanes

M32 = 2**32

NARROW = ["bool", "uint8", "int16", "int32", "bfloat16", "float32", "complex64", "float8_e4m3fn", "int4"]
WIDE = ["int64", "uint64", "float64", "complex128"]


def reference_mix(outer, inner, word):
    place = (inner * 0x9E3779B1 % M32) ^ (outer * 0x27D4EB2F % M32)
    place ^= place >> 15
    low = (word ^ place) * 0x85EBCA6B % M32
    low ^= low >> 13
    low = low * 0xC2B2AE35 % M32
    low ^= low >> 16
    high = (low + place) * 0x2C1B3C6D % M32
    return low, high ^ (high >> 15)


def words_of(array):
    """Returns one list of words for each element, in row-major order."""
    array = np.ascontiguousarray(array)
    if array.dtype.name in ("int4", "uint4"):
        return [[int(x) % 16] for x in array.ravel()]
    size = array.dtype.itemsize
    if size <= 2:
        return [[int(x)] for x in array.ravel().view(f"uint{8 * size}")]
    return array.ravel().view(np.uint32).reshape(-1, size // 4).tolist()


def reference(array, shape=None, start=None):
    """Returns the checksum by the definition, in Python's integers; with `shape` and `start` that of a shard."""
    shape, start = shape or array.shape, start or (0,) * array.ndim
    low = high = 0
    for index, words in zip(np.ndindex(array.shape), words_of(array), strict=True):
        first = inner_dims_from(shape, len(words))
        at = [i + s for i, s in zip(index, start, strict=True)]
        flat = lambda dims, at=at: sum(at[d] * math.prod(shape[d + 1 : dims.stop]) for d in dims)
        outer, inner = flat(range(first)), flat(range(first, len(shape))) * len(words)
        for i, word in enumerate(words):
            a, b = reference_mix(outer, inner + i, word)
            low, high = (low + a) % M32, (high + b) % M32
    return high << 32 | low


def random_array(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.name in ("int4", "uint4"):
        return rng.integers(0, 8, shape).astype(dtype)
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def mesh_of(*sizes):
    names = ("a", "b", "c")[: len(sizes)]
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)


def test_checksums_follow_the_definition():
    for dtype in NARROW:
        array = random_array(dtype, (3, 5))
        assert checksums({"x": jnp.asarray(array)}) == {"x": reference(array)}, dtype


def test_checksums_of_64_bit_dtypes_follow_the_definition():
    with jax.enable_x64(True):
        for dtype in WIDE:
            array = random_array(dtype, (3, 5))
            assert checksums([jnp.asarray(array)]) == {"0": reference(array)}, dtype


def test_keys_scalars_and_empty_leaves_have_checksums():
    keys = jax.random.split(jax.random.key(7), 3)
    data = np.asarray(jax.random.key_data(keys))
    wanted = reference(np.ascontiguousarray(data).view("complex64")[..., 0])  # two words an element
    found = checksums({"keys": keys, "key": jax.random.key(7), "scalar": jnp.float32(2.5), "none": jnp.zeros((0, 3))})
    assert found["keys"] == wanted
    assert found["scalar"] == reference(np.array(2.5, np.float32))
    assert found["none"] == 0 and found["key"] not in (0, wanted)


SPECS = [((8,), ("a",)), ((2, 4), (("a", "b"),)), ((2, 4), ("b", "a")), ((2, 2, 2), ("c", None, "a")), ((2, 2), ())]


def test_a_checksum_is_the_same_on_every_mesh():
    array = random_array("bfloat16", (8, 4, 6))
    for sizes, spec in SPECS:
        placed = jax.device_put(array, NamedSharding(mesh_of(*sizes), PartitionSpec(*spec)))
        assert checksums({"x": placed}) == {"x": reference(array)}, (sizes, spec)


def test_sharded_keys_and_host_leaves_count_alike():
    keys, x = jax.random.split(jax.random.key(1), 8), jnp.arange(32.0).reshape(8, 4)
    wanted = checksums({"keys": keys, "x": x})
    spread = NamedSharding(mesh_of(2, 4), PartitionSpec(("a", "b")))
    hosted = jax.device_put(x, spread.with_memory_kind("pinned_host"))
    assert checksums({"keys": jax.device_put(keys, spread), "x": hosted}) == wanted


def test_shards_add_up_inside_of_shard_map():
    array, mesh = random_array("float32", (8, 12)), mesh_of(2, 4)

    def body(shard):
        start = (jax.lax.axis_index("a") * 4, jax.lax.axis_index("b") * 3)
        return jax.lax.psum(shard_lanes(shard, start, (8, 12)), ("a", "b"))

    sums = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("a", "b"), out_specs=PartitionSpec()))
    assert as_int(sums(array)) == reference(array) == as_int(leaf_lanes(jnp.asarray(array)))


@pytest.mark.parametrize(("shape", "start"), [((2**10, 3, 2**31), (7, 1, 2**30)), ((2**31,), (2**31 - 4,))])
def test_positions_beyond_32_bits_do_not_wrap(shape, start):
    block = random_array("float32", (2,) * len(shape))
    assert as_int(shard_lanes(jnp.asarray(block), start, shape)) == reference(block, shape, start)
    far = tuple(s + 4 * (d == 0) for d, s in enumerate(start))
    assert reference(block, shape, start) != reference(block, shape, far)


def test_flipped_bits_and_swaps_change_the_checksum():
    array = random_array("float32", (4, 4))
    sums = jax.jit(jax.vmap(leaf_lanes))
    bits = np.tile(array.view(np.uint32).reshape(1, 16), (16 * 32, 1))
    for element in range(16):
        for bit in range(32):
            bits[element * 32 + bit, element] ^= np.uint32(1 << bit)
    swapped = []
    for i, j in itertools.combinations(range(16), 2):
        order = np.arange(16)
        order[[i, j]] = j, i
        swapped.append(array.reshape(-1)[order].view(np.uint32))
    negated = (array.view(np.uint32) ^ np.uint32(2**31)).reshape(1, 16)
    variants = np.concatenate([array.view(np.uint32).reshape(1, 16), bits, np.array(swapped), negated])
    found = {as_int(pair) for pair in np.asarray(sums(jnp.asarray(variants)))}
    assert len(found) == 1 + 16 * 32 + 120 + 1
    lows = np.asarray(sums(jnp.asarray(variants)))[:, 0]
    assert (lows[1 : 1 + 16 * 32] != lows[0]).all(), "the low lane alone finds every single flip"
