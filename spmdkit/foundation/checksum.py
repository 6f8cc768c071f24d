"""Checksums of arrays, equal on any mesh, sharding and number of processes, and computed without a gather.

    checksum(leaf) = sum over the words of the leaf of mix(position in the full leaf, bits)        64 bits

Each device reads its shard once and sends one number. The comparison of parameters before the first step and the
replica check use it. Chunks of a checkpoint have different checksums.

- A word is up to 32 bits of one element: two words for 64 bits and complex64, four for complex128, the low half first,
  real before imaginary. Booleans are 0 and 1. Typed keys are the uint32 of their data. Bits are compared, not values.
- The position of a word is a pair of uint32, (`outer`, `inner`): the row-major index over the leading and over the
  trailing dims, times the words of an element, plus the word's number. The trailing dims hold fewer than 2^32 words.
- JAX without x64 has no uint64: the number is `high * 2^32 + low`, each summed modulo 2^32. `low` is a bijection of the
  word at its position, so one changed word always changes the sum. Several changes cancel with probability 2^-64.

The checksum detects accidental changes, not attacks. Wire: 8 bytes per leaf, summed over all devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.foundation.trees import is_key, named_leaves

WORDS_OF_INNER = 2**32
_GOLDEN, _OUTER = np.uint32(0x9E3779B1), np.uint32(0x27D4EB2F)
_FIRST, _SECOND, _THIRD = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x2C1B3C6D)


def checksums(tree: Any) -> dict[str, int]:
    """Returns {path of the leaf: its checksum, 0 <= n < 2^64} of a tree of jax arrays. Waits for the device.

    A collective call: every process of a run makes it at the same point. Compiles once for each kind of leaf (shape,
    dtype, sharding).
    """
    return values(lanes_of(tree))


def lanes_of(tree: Any) -> dict[str, jax.Array]:
    """Returns {path: uint32[2]} without waiting, for a state that is donated next. See `values`."""
    return {path: _whole_leaf(leaf) for path, leaf in named_leaves(tree)}


def values(lanes: dict[str, jax.Array]) -> dict[str, int]:
    """Waits for the lanes and returns {path: checksum}."""
    return {path: as_int(pair) for path, pair in jax.device_get(lanes).items()}


def as_int(lanes: Any) -> int:
    """Returns the checksum of uint32[2] (low, high) on the host."""
    low, high = (int(lane) for lane in np.asarray(lanes))
    return high << 32 | low


def leaf_lanes(leaf: jax.Array) -> jax.Array:
    """Returns uint32[2], (low, high), of a global leaf. Pure, for any jitted program; the partitioner handles
    shards."""
    return shard_lanes(leaf, (0,) * leaf.ndim, leaf.shape)


def shard_lanes(shard: jax.Array, start: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """Returns uint32[2] of one shard of a leaf, for `shard_map`. A `psum` over the shards gives the leaf's lanes.

    Args:
        start: index of the shard's first element in the full leaf, a number or traced integer for each dim.
        shape: shape of the full leaf.
    """
    words = _words(shard)
    per_element = words.shape[-1]
    outer, inner = _positions(shard.shape, start, shape, per_element)
    place = lax.expand_dims(inner, (len(shard.shape),)) + lax.iota(jnp.uint32, per_element)
    low, high = _mix(lax.expand_dims(outer, (len(shard.shape),)), place, words)
    dims = tuple(range(low.ndim))
    return jnp.stack([jnp.sum(lane, axis=dims, dtype=jnp.uint32) for lane in (low, high)])


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array, uint32[*shape, words of an element]."""
    if is_key(x):
        x = jax.random.key_data(x)
        return _words(x).reshape(*x.shape[:-1], -1)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(lax.real(x)), _words(lax.imag(x))], axis=-1)
    if x.dtype == jnp.bool_:
        return lax.convert_element_type(x, jnp.uint32)[..., None]
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits > 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.convert_element_type(lax.bitcast_convert_type(x, f"uint{bits}"), jnp.uint32)[..., None]


def _positions(
    block: Sequence[int], start: Sequence[Any], shape: Sequence[int], per_element: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (outer, inner), uint32 that broadcast to `block`: the position of each element's first word in the full
    leaf."""
    first = inner_dims_from(shape, per_element)
    outer = inner = jnp.zeros((1,) * len(shape), jnp.uint32)
    for dim in range(len(shape)):
        is_inner = dim >= first
        stride = math.prod(shape[dim + 1 :]) * per_element if is_inner else math.prod(shape[dim + 1 : first])
        along = lax.iota(jnp.uint32, block[dim]) + lax.convert_element_type(start[dim], jnp.uint32)
        along = (along * np.uint32(stride % WORDS_OF_INNER)).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        outer, inner = (outer, inner + along) if is_inner else (outer + along, inner)
    return outer, inner


def inner_dims_from(shape: Sequence[int], per_element: int) -> int:
    """Returns the first of the trailing dims that together hold fewer than 2^32 words."""
    first = len(shape)
    while first > 0 and math.prod(shape[first - 1 :]) * per_element < WORDS_OF_INNER:
        first -= 1
    return first


def _mix(outer: jax.Array, inner: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lanes (low, high) of words at positions."""
    place = (inner * _GOLDEN) ^ (outer * _OUTER)
    place = place ^ (place >> np.uint32(15))
    low = (word ^ place) * _FIRST
    low = low ^ (low >> np.uint32(13))
    low = low * _SECOND
    low = low ^ (low >> np.uint32(16))
    high = (low + place) * _THIRD
    return low, high ^ (high >> np.uint32(15))


def _whole_leaf(leaf: jax.Array) -> jax.Array:
    """Returns uint32[2] of a leaf, replicated over the devices that store a shard of it."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return _program(None)(leaf)
    if sharding.memory_kind not in (None, "device"):  # XLA computes on each device's shard
        leaf = jax.device_put(leaf, sharding.with_memory_kind("device"))
    return _program(sharding.mesh)(leaf)


@functools.lru_cache(maxsize=8)
def _program(mesh: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the jitted `leaf_lanes` with a replicated result, which every process can read."""
    return jax.jit(leaf_lanes, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))
