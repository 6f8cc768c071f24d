"""Compressed sums with error feedback on both roundings, for `bfloat16`, `int8`, `float8` and `sign`.

    c_r = g_r / C + e_r                this replica's part of the mean, and its residual                  float32
    s_r = decode(encode(c_r))          all_to_all: the owner of a part receives it from all               integers
    p   = sum_r s_r,  q = decode(encode(p))     the owner adds in float32; all_gather                     integers
    e_r = c_r - s_r  (+ p - q on the owner of a part)

One residual holds both roundings: the owner of a part adds the rounding error of the sum to its residual. Nothing is
lost, only delayed: over any number of steps, the applied updates and the residuals add up to the true sum. The whole
gradient is one vector. Devices send unsigned integers, never narrow floats, which a compiler may widen. The scales of
blocks are in the same array as their values, padded to a multiple of 1,024: the TPU compiler turns a shorter all_gather
into an all_reduce of twice its bytes (libtpu 0.0.42).

A value that is not finite makes its whole block non-finite, on all replicas.

Source: Seide et al., "1-bit stochastic gradient descent" (2014), section 2, error feedback; Karimireddy et al., "Error
feedback fixes SignSGD" (2019); Tang et al., "DoubleSqueeze" (2019), compensation on both sides; Dettmers, "8-bit
approximations for parallelism in deep learning" (2016), and Dettmers et al., "8-bit optimizers via block-wise
quantization" (2022), section 2, blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.communication.reducers.base import (
    PAD,
    LeafShapes,
    LeafState,
    Leaves,
    ReduceGroup,
    Reducer,
    buffer_groups,
    exchange_parts,
    flatten,
    gather_parts,
    stateless,
    unflatten,
)
from spmdkit.errors import ConfigError

Encoded = Sequence[jax.Array]


@dataclass(frozen=True)
class Code:
    """How a row of values is encoded.

    Attributes:
        encode: float32[..., length] -> arrays of unsigned integers [..., n], each n a multiple of `PAD`.
        decode: `(the same arrays, length)` -> float32[..., length].
        row_bytes: length -> bytes of an encoded row.
        multiple: `length` is a multiple of it.
    """

    encode: Callable[[jax.Array], Encoded]
    decode: Callable[[Encoded, int], jax.Array]
    row_bytes: Callable[[int], int]
    multiple: int = PAD


def coded_reducer(code: Code, error_feedback: bool, exact_options: Mapping[str, Any]) -> Reducer:
    """Returns the reducer that sends values encoded by `code`.

    Args:
        error_feedback: False drops the rounding error: no memory, and a bias that does not average out.
        exact_options: options at which nothing is rounded.
    """

    def apply(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        out, new = list(leaves), list(states)
        for group in buffer_groups(leaves):
            owed = [states[i]["error"] for i in group] if error_feedback else None
            total, left = coded_sum([leaves[i] for i in group], owed, over, code)
            for i, leaf in zip(group, total, strict=True):
                out[i] = leaf
            for i, error in zip(group, left, strict=False):
                new[i] = {"error": error}
        return out, new

    def wire(values: int, num: int) -> float:
        length = -(-values // (num * code.multiple)) * code.multiple
        return 2 * (num - 1) * code.row_bytes(length)

    return Reducer(
        exact=False,
        apply=apply,
        wire=wire,
        init=error_like if error_feedback else stateless,
        input_scale="weighted",
        exact_options=exact_options,
    )


def error_like(leaf: jax.ShapeDtypeStruct) -> LeafShapes:
    """Returns the state of a reducer with a residual for each value."""
    return {"error": jax.ShapeDtypeStruct(leaf.shape, jnp.float32)}


def coded_sum(
    leaves: Sequence[jax.Array], owed: Sequence[jax.Array] | None, over: ReduceGroup, code: Code
) -> tuple[Leaves, Leaves]:
    """Returns (the sums, the new residuals; no residuals without error feedback)."""
    multiple = over.num * code.multiple
    own = flatten(leaves, multiple)
    if owed is not None:
        own = own + flatten(owed, multiple).astype(own.dtype)
    own = own.reshape(over.num, -1)
    length = own.shape[1]
    to_owner = code.encode(own.astype(jnp.float32))
    part = code.decode([exchange_parts(x, over.axes) for x in to_owner], length).sum(0)
    to_all = code.encode(part)
    total = code.decode([gather_parts(x, over.axes).reshape(over.num, -1) for x in to_all], length).reshape(-1)
    if owed is None:
        return unflatten(total, leaves), []
    left = own - code.decode(to_owner, length).astype(own.dtype)
    owner = _place_owned_part(part - code.decode(to_all, length), over).astype(own.dtype)
    return unflatten(total, leaves), unflatten((left + owner).reshape(-1), leaves, jnp.float32)


def _place_owned_part(part: jax.Array, over: ReduceGroup) -> jax.Array:
    """Returns [replicas, part]: zeros except for the part that this replica owns."""
    is_mine = (jnp.arange(over.num, dtype=jnp.int32) == lax.axis_index(over.axes))[:, None]
    return jnp.where(is_mine, part, 0)


# ---- blocks with a scale each


def block_code(name: str, block: int, encode: Any, decode: Any, bits: int = 8) -> Code:
    """Returns the code that sends each block of values as integers and one float32 scale.

    Args:
        name: of the reducer, for messages.
        block: values in a block.
        encode: float32[..., blocks, block] -> (uint8[..., blocks * block * bits / 8] in any shape, scales float32[...,
            blocks]).
        decode: (uint8[..., length * bits / 8], scales float32[..., blocks, 1]) -> float32[..., blocks, block].

    Raises:
        ConfigError: `block` is not a positive integer.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ConfigError(
            f"{name}.block is {block!r}. It is the number of values that share a scale, at least 1. Write block: 256."
        )
    multiple = math.lcm(PAD, block)

    def encode_row(x: jax.Array) -> Encoded:
        lead = x.shape[:-1]
        payload, scales = encode(x.astype(jnp.float32).reshape(*lead, -1, block))
        row = jnp.concatenate([payload.reshape(*lead, -1), _bytes_of(scales)], -1)
        return [jnp.pad(row, [(0, 0)] * len(lead) + [(0, -row.shape[-1] % PAD)])]

    def decode_row(sent: Encoded, length: int) -> jax.Array:
        row, num = sent[0], length // block
        payload, scales = row[..., : length * bits // 8], row[..., length * bits // 8 :][..., : 4 * num]
        result: jax.Array = decode(payload, _float32_of(scales)[..., None]).reshape(*row.shape[:-1], length)
        return result

    def row_bytes(length: int) -> int:
        used = length * bits // 8 + 4 * (length // block)
        return used + -used % PAD

    return Code(encode_row, decode_row, row_bytes, multiple)


def _bytes_of(x: jax.Array) -> jax.Array:
    """Returns uint8[..., 4 n] of float32[..., n]."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _float32_of(x: jax.Array) -> jax.Array:
    """Returns float32[..., n] of uint8[..., 4 n]."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.float32)
