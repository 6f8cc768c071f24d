"""Compressed sums with error feedback on both roundings, for `bfloat16`, `int8`, `float8` and `sign`.

    c_r = g_r / C + e_r                this replica's part of the mean, and its residual                  float32
    s_r = decode(encode(c_r))          all_to_all: each part is sent to its owner                         integers
    p   = sum_r s_r,  q = decode(encode(p))     the owner adds in float32; all_gather                     integers
    e_r = c_r - s_r  (+ p - q on the owner of a part)

One residual contains both rounding errors: over any number of steps, the applied updates and the residuals add up to
the true sum. The gradient is flattened into one vector. Devices send unsigned integers, never narrow floats, which a
compiler may widen. Block scales are in the same array as the values, padded to a multiple of 1,024: the TPU compiler
turns a shorter all_gather into an all_reduce of twice its bytes (libtpu 0.0.42). A non-finite value makes its entire
block non-finite on all replicas.

Memory: 4 bytes per value on each replica, in the train state.
Wire: all_to_all and all_gather over the replica axes. With `p` the values that a replica owns, `V / N` rounded up to a
multiple of 1,024 (and of the block), and `bits` for each, a device sends `2 (N-1) * r(p bits / 8 + 4 p / block)` bytes
in a step, `r` rounding up to a multiple of 1,024.
Source: Seide et al., "1-bit stochastic gradient descent" (2014), section 2, error feedback; Karimireddy et al., "Error
feedback fixes SignSGD" (2019); Tang et al., "DoubleSqueeze" (2019), compensation on both sides; Dettmers, "8-bit
approximations for parallelism in deep learning" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.communication.options import check_option, is_whole
from spmdkit.communication.reducers.base import (
    PAD,
    LeafShapes,
    LeafState,
    Leaves,
    ReduceGroup,
    Reducer,
    flatten,
    gather_parts,
    map_buffers,
    stateless,
    unflatten,
)

Encoded = Sequence[jax.Array]


@dataclass(frozen=True)
class Code:
    """An encoding of a row of values.

    Attributes:
        encode: float32[..., length] -> arrays of unsigned integers [..., n], each n a multiple of `PAD`.
        decode: `(encoded arrays, length)` -> float32[..., length].
        row_bytes: length -> bytes of an encoded row.
        multiple: `length` must be a multiple of this.
    """

    encode: Callable[[jax.Array], Encoded]
    decode: Callable[[Encoded, int], jax.Array]
    row_bytes: Callable[[int], int]
    multiple: int = PAD


def coded_reducer(code: Code, error_feedback: bool, exact_options: Mapping[str, Any]) -> Reducer:
    """Returns the reducer that sends values encoded by `code`.

    Args:
        error_feedback: False drops the rounding error. This uses no memory, and adds a bias that does not average out.
        exact_options: options at which no value is rounded.
    """

    def apply(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        return map_buffers(leaves, states, lambda group, group_states: coded_sum(group, group_states, over, code))

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
    leaves: Leaves, states: list[LeafState], over: ReduceGroup, code: Code
) -> tuple[Leaves, Sequence[LeafState]]:
    """Returns (sums, states with the new residuals; unchanged states without error feedback)."""
    multiple, has_error = over.num * code.multiple, "error" in states[0]
    compensated = flatten(leaves, multiple)
    if has_error:
        compensated = compensated + flatten([state["error"] for state in states], multiple).astype(compensated.dtype)
    compensated = compensated.reshape(over.num, -1)
    length = compensated.shape[1]
    to_owner = code.encode(compensated.astype(jnp.float32))
    part = code.decode([_exchange(x, over) for x in to_owner], length).sum(0)
    to_all = code.encode(part)
    total = code.decode([gather_parts(x, over.axes).reshape(over.num, -1) for x in to_all], length).reshape(-1)
    if not has_error:
        return unflatten(total, leaves), states
    local_error = compensated - code.decode(to_owner, length).astype(compensated.dtype)
    owner_error = _place_owned_part(part - code.decode(to_all, length), over).astype(compensated.dtype)
    errors = unflatten((local_error + owner_error).reshape(-1), leaves, jnp.float32)
    return unflatten(total, leaves), [{"error": error} for error in errors]


def _exchange(rows: jax.Array, over: ReduceGroup) -> jax.Array:
    """Returns the rows [replicas, bytes] that all replicas have for this one. With lanes of 128 bytes the TPU compiler
    (libtpu 0.0.42) takes 0.4 s for an all_to_all of 4 MB, without them 17 s, and more than linearly for more."""
    received: jax.Array = lax.all_to_all(rows.reshape(over.num, -1, 128), over.axes, 0, 0, tiled=True)
    return received.reshape(rows.shape)


def _place_owned_part(part: jax.Array, over: ReduceGroup) -> jax.Array:
    """Returns [replicas, part]: zeros, except for the part that this replica owns."""
    is_mine = (jnp.arange(over.num, dtype=jnp.int32) == lax.axis_index(over.axes))[:, None]
    return jnp.where(is_mine, part, 0)


# ---- blocks with one scale each


def block_code(name: str, block: int, encode: Any, decode: Any, bits: int = 8) -> Code:
    """Returns the code that sends each block of values as integers and one float32 scale.

    Args:
        name: name of the reducer, for messages.
        block: number of values in a block.
        encode: float32[..., blocks, block] -> (uint8[..., blocks * block * bits / 8] in any shape, scales float32[...,
            blocks]).
        decode: (uint8[..., length * bits / 8], scales float32[..., blocks, 1]) -> float32[..., blocks, block].
    """
    rule = "It is the number of values that share a scale, at least 1. Write block: 256."
    check_option(is_whole(block, 1), f"{name}.block", block, rule)
    multiple = math.lcm(PAD, block)

    def encode_row(x: jax.Array) -> Encoded:
        lead = x.shape[:-1]
        payload, scales = encode(x.astype(jnp.float32).reshape(*lead, -1, block))
        of_scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*lead, -1)
        row = jnp.concatenate([payload.reshape(*lead, -1), of_scales], -1)
        return [jnp.pad(row, [(0, 0)] * len(lead) + [(0, -row.shape[-1] % PAD)])]

    def decode_row(sent: Encoded, length: int) -> jax.Array:
        row, end, num = sent[0], length * bits // 8, length // block
        of_scales = row[..., end : end + 4 * num].reshape(*row.shape[:-1], num, 4)
        scales = lax.bitcast_convert_type(of_scales, jnp.float32)
        result: jax.Array = decode(row[..., :end], scales[..., None]).reshape(*row.shape[:-1], length)
        return result

    def row_bytes(length: int) -> int:
        used = length * bits // 8 + 4 * (length // block)
        return used + -used % PAD

    return Code(encode_row, decode_row, row_bytes, multiple)
