"""The order of a sequence on a mesh with a context axis, with conversion in both directions.

With a causal mask token t needs t + 1 keys: with contiguous shards the last of C devices has 2C-1 times the work of the
first. Zig-zag order assigns chunks i and 2C-1-i of 2C chunks to device i, which balances the work.

    zigzag       C = 2, chunks 0 1 2 3:   device 0 holds 0 3, device 1 holds 1 2
    contiguous   device 0 holds 0 1, device 1 holds 2 3

A model reorders its arrays along the sequence (inputs, already shifted targets, loss masks, segment ids) once. All
later code is per token, and `sk.attention` uses the order. Without a context axis these functions return their
arguments.

    inputs_BT, targets_BT = sk.context_order((tokens_BT[:, :-1], tokens_BT[:, 1:]))
    positions_T = sk.context_positions(inputs_BT.shape[1])            # for rotary and learned positions

Wire: into mesh order nothing (each device slices its full copy of the sequence); back (C-1)/C to 1 times the shard's
bytes.
Source: Llama Team, "The Llama 3 Herd of Models" (2024), section 3.3.2 (chunks i and 2C-1-i).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.ops.collectives import axes, axis_index, axis_size
from spmdkit.ops.manual import manual
from spmdkit.step import trace_context

Order = Literal["zigzag", "contiguous"]


def order() -> Order:
    """Returns the order of the mesh in scope; contiguous for the all-to-all form and for a mesh without a context
    axis."""
    choice = trace_context.current().options.attention
    is_zigzag = choice.order == "zigzag" and choice.context == "ring" and axis_size("sequence") > 1
    return "zigzag" if is_zigzag else "contiguous"


def context_order(tree: Any, dim: int = 1) -> Any:
    """Returns the arrays of `tree` with `dim`, a full sequence, in mesh order and sharded over the context axis. Raises
    ConfigError if the length is not divisible by twice that axis (contiguous: by the axis).

    Layout: input: dim 0 as `batch`, `dim` unsharded; output: `dim` as `sequence`. With `dim=0` there is no batch dim.
    """
    trace_context.current().usage.record_call("context_order")
    num, unit = _parts(tree, dim, "sk.context_order")
    if num == 1:
        return tree

    def context_order(tree: Any) -> Any:
        index = axis_index("sequence")

        def local_part(x: jax.Array) -> jax.Array:
            chunk = x.shape[dim] // unit
            take: Callable[[Any], jax.Array] = lambda i: lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=dim)
            return jnp.concatenate([take(index), take(unit - 1 - index)], dim) if unit > num else take(index)

        return jax.tree.map(local_part, tree)

    return manual(context_order, [_dims(dim, None)], _dims(dim, "sequence"))(tree)


def context_positions(length: int) -> jax.Array | np.ndarray:
    """Returns int32[length], the sequence positions in mesh order, sharded over the context axis. Inside `sk.manual`:
    int32[length / C], the positions on this device.

    Without a context axis it is a NumPy array. Values that NumPy computes from it, such as the angles of rotary
    positions, are constants of the step: XLA on CPU would compute them for each example and head."""
    positions: jax.Array | np.ndarray = context_order(np.arange(length, dtype=np.int32), dim=0)
    return positions


def context_restore(tree: Any, dim: int = 1) -> Any:
    """Returns the arrays of `tree` converted on `dim` from mesh order to sequence order, still sharded. For per-token
    outputs of a model. Wire: each half of a shard is sent to one device, two permutations in total."""
    num, unit = _parts(tree, dim, "sk.context_restore")
    if unit == num:
        return tree
    chunks = [(i, unit - 1 - i) for i in range(num)]  # one of the pair is even, one odd
    even = [(i, (a if a % 2 == 0 else b) // 2) for i, (a, b) in enumerate(chunks)]
    odd = [(i, (a if a % 2 else b) // 2) for i, (a, b) in enumerate(chunks)]

    def context_restore(tree: Any) -> Any:
        is_even, (axis,) = axis_index("sequence") % 2 == 0, axes("sequence")

        def restore(x: jax.Array) -> jax.Array:
            early, late = jnp.split(x, 2, dim)
            to_even = lax.ppermute(jnp.where(is_even, early, late), axis, even)
            return jnp.concatenate([to_even, lax.ppermute(jnp.where(is_even, late, early), axis, odd)], dim)

        return jax.tree.map(restore, tree)

    return manual(context_restore, [_dims(dim, "sequence")], _dims(dim, "sequence"))(tree)


def chunks(num: int) -> int:
    """Returns the number of chunks of a sequence on `num` devices, for the order of the mesh in scope."""
    return 2 * num if order() == "zigzag" else num


def _parts(tree: Any, dim: int, what: str) -> tuple[int, int]:
    """Returns (devices along the context axis, chunks of a sequence)."""
    num = axis_size("sequence")
    unit = chunks(num)
    if num == 1:
        return 1, 1
    if len(mesh_axes := axes("sequence")) > 1:
        raise ConfigError(
            f"{what}: layout.axes.sequence means the mesh axes {list(mesh_axes)}. A sequence runs along one axis. Name "
            "context alone."
        )
    for path, leaf in named_leaves(tree):
        length = jnp.shape(leaf)[dim] if jnp.ndim(leaf) > dim else None
        if length is None or (what == "sk.context_order" and length % unit):
            shape = tuple(jnp.shape(leaf))
            at = f" '{path}'" if path else ""
            raise ConfigError(
                f"{what}(dim={dim}): the array{at} has shape {shape}; mesh.context {num} in {order()} order cuts dim "
                f"{dim} into {unit} chunks. The dim exists and is a multiple of {unit}. Try a length of "
                f"{-(-(length or 1) // unit) * unit}."
            )
    return num, unit


def _dims(dim: int, name: str | None) -> tuple[str | None, ...]:
    return (*(("batch", *[None] * (dim - 1)) if dim else ()), name)
