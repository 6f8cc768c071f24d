"""Exact sparse reduction of embedding gradients: the tokens of a step touch few rows of a table, and only these rows
are sent, with their indices.

    rounds = max_r ceil(touched_r / N)               touched_r: rows of g_r[V D] that are not all zero; one all_reduce
                                                     of a maximum
    in round i: all_gather over the replicas of (row numbers [N], rows [N D])  ->  g[V D] += rows, replica by replica

In a round each replica sends at most N rows of a table. The replica with the most touched rows determines the number of
rounds, at most `V / N`, which an all_reduce computes before the loop. The result is the sum of all rows for any N.
Leaves that do not match `leaves` are reduced as by `sum`. The rounds of each table are a metric of the step,
`reducer/rounds/PATH`: if it stays above one, N is too small.

Use it for tables with many more rows than a batch has tokens. Do not use it for dense gradients: a table that is also
the head of the model (tied weights), or one with weight decay added to the gradient. A table that would send more than
`most` of the bytes of `sum` in the first batch is rejected.
If a table is sharded over model axes or scattered by ZeRO 2, each device reduces its rows.
Wire: a device sends `(n-1) * 4 p` bytes for a table and round, with n replicas and `p = N (D + 1)` rounded up to a
multiple of 1,024, `8 (n-1)/n` for the number of rounds, and `8 (n-1)/n` for each value of other leaves. So `n N (D + 1)
/ (2 V D)` of `sum` for a table in one round.
Source: Horovod, `allreduce` of `tf.IndexedSlices` (all_gather of values and indices); Li et al., "Parallax" (2019),
section 3.1, sparse variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.communication.options import check_option, check_patterns, is_number, is_whole
from spmdkit.communication.reducers.base import (
    PAD,
    LeafState,
    Leaves,
    ReducedLeaf,
    ReduceGroup,
    Reducer,
    ReducerMetrics,
    gather_parts,
)
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import common_dtype


def make(leaves: str | Sequence[str], rows: int, most: float | None = 1.0) -> Reducer:
    """Returns the reducer.

    Args:
        leaves: patterns for the complete paths of the tables. The first dim of a table is its rows.
        rows: N, the number of rows of a table that a replica sends in a round.
        most: limit for a table's bytes in the first batch, as a fraction of those of `sum`; None: no limit.
    """
    _check_options(leaves, rows, most)
    patterns = [leaves] if isinstance(leaves, str) else list(leaves)

    def is_table(path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    def tables(gradient: Leaves, over: ReduceGroup) -> list[int]:
        return [i for i, path in enumerate(over.paths) if is_table(path) and gradient[i].ndim > 1 and gradient[i].size]

    def apply_with_metrics(
        gradient: Leaves, states: list[LeafState], over: ReduceGroup
    ) -> tuple[Leaves, list[LeafState], ReducerMetrics]:
        out, table_indices, metrics = list(gradient), tables(gradient, over), dict[str, jax.Array]()
        dense_indices = [i for i in range(len(gradient)) if i not in table_indices]
        for i, total in zip(dense_indices, lax.psum([gradient[i] for i in dense_indices], over.axes), strict=True):
            out[i] = total
        for i, rounds in zip(table_indices, _rounds([gradient[i] for i in table_indices], rows, over), strict=True):
            out[i], name = _summed(gradient[i], rounds, rows, over), f"rounds/{over.paths[i]}"
            metrics[name] = jnp.maximum(metrics.get(name, 0), rounds.astype(jnp.float32))
        return out, states, metrics

    def wire_of(added: Sequence[ReducedLeaf]) -> float:
        return sum(_round_bytes(x, rows) if is_table(x.path) and len(x.shape) > 1 else x.allreduce_bytes for x in added)

    def check(added: Sequence[ReducedLeaf]) -> None:
        for pattern in patterns:
            _check_named(pattern, added)
        for table in (x for x in added if is_table(x.path)):
            _check_table(table, rows, most)

    def validate_first_step(added: Sequence[ReducedLeaf], step_metrics: Mapping[str, float]) -> None:
        for table in added:
            _check_first(table, rows, most, step_metrics.get(f"rounds/{table.path}", 0))

    return Reducer(
        exact=True,
        apply=lambda gradient, states, over: apply_with_metrics(gradient, states, over)[:2],
        wire=lambda values, num: 8 * (num - 1) / num * values,
        wire_of=wire_of,
        check=check,
        apply_with_metrics=apply_with_metrics,
        validate_first_step=validate_first_step,
    )


# ---- on the devices


def _nonzero_rows(leaf: jax.Array) -> jax.Array:
    """Returns bool[V], True for the rows with a nonzero value. A NaN is nonzero."""
    return jnp.any(leaf.reshape(leaf.shape[0], -1) != 0, axis=1)


def _rounds(leaves: Sequence[jax.Array], rows: int, over: ReduceGroup) -> list[jax.Array]:
    """Returns int32[] for each leaf, the number of rounds, equal on every device."""
    if not leaves:
        return []
    shard_axes = sorted({axis for x in leaves for axis in compat.varying_axes(x)} - set(over.axes))
    num = [-(-_nonzero_rows(x).sum(dtype=jnp.int32) // min(rows, x.shape[0])) for x in leaves]
    all_axes = (*over.axes, *shard_axes)
    return list(jnp.maximum(lax.pmax(jnp.stack(compat.as_varying(num, all_axes)), all_axes), 1))


def _summed(leaf: jax.Array, rounds: jax.Array, rows: int, over: ReduceGroup) -> jax.Array:
    """Returns the sum of a leaf over replicas. In a round each replica sends `rows` touched rows."""
    num, rows = leaf.shape[0], min(rows, leaf.shape[0])
    table = leaf.reshape(num, -1).astype(common_dtype(leaf.dtype, jnp.float32))
    indices = jnp.sort(jnp.where(_nonzero_rows(leaf), jnp.arange(num, dtype=jnp.uint32), num))
    indices = jnp.pad(indices, (0, -num % rows), constant_values=num)  # touched rows first; index `num` is padding

    def one_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, total = carry
        round_indices = lax.dynamic_slice_in_dim(indices, i * rows, rows)
        sent = _packed(round_indices, table.at[round_indices].get(mode="fill", fill_value=0))
        messages = gather_parts(sent, over.axes).reshape(over.num, -1)
        return i + 1, lax.scan(add, total, messages)[0]

    def add(total: jax.Array, sent: jax.Array) -> tuple[jax.Array, None]:
        numbers, values = _unpacked(sent, rows, table)
        return total.at[numbers].add(values, mode="drop"), None

    shard_axes = tuple(compat.varying_axes(leaf) - set(over.axes))
    first = 0 * rounds  # batched like the loop's other values under a `vmap` over groups
    zeros = compat.as_varying(jnp.zeros(table.shape, table.dtype) + first.astype(table.dtype), shard_axes)
    _, total = lax.while_loop(lambda carry: carry[0] < rounds, one_round, (first, zeros))
    return total.reshape(leaf.shape).astype(leaf.dtype)


def _packed(numbers: jax.Array, values: jax.Array) -> jax.Array:
    """Returns uint32[p], the row numbers and the bits of the values, padded with zeros to a multiple of 1,024."""
    bits = lax.bitcast_convert_type(values, jnp.uint32).reshape(-1)
    row = jnp.concatenate([numbers, bits])
    return jnp.pad(row, (0, -len(row) % PAD))


def _unpacked(sent: jax.Array, rows: int, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (uint32[rows] row numbers, values [rows, D]) from a replica's message."""
    words = table.dtype.itemsize // 4
    bits = sent[rows : rows * (1 + table.shape[1] * words)].reshape(rows, table.shape[1], *[2] * (words == 2))
    return sent[:rows], lax.bitcast_convert_type(bits, table.dtype)


# ---- checks before and after the first step


def _round_bytes(leaf: ReducedLeaf, rows: int) -> float:
    """Returns the bytes that a device sends for a table in one round."""
    words = min(rows, leaf.shape[0]) * (1 + leaf.size // leaf.shape[0] * leaf.value_bytes // 4)
    return (leaf.num - 1) * (4 * (words + -words % PAD) + 8 / leaf.num)


def _check_options(leaves: str | Sequence[str], rows: int, most: float | None) -> None:
    is_list = isinstance(leaves, Sequence) and bool(leaves) and all(isinstance(x, str) for x in leaves)
    rule = "It is a pattern for the whole paths of the tables, or a list of patterns. Write leaves: [embed]."
    check_option(is_list, "sparse_rows.leaves", leaves, rule)
    check_patterns("sparse_rows.leaves", [leaves] if isinstance(leaves, str) else leaves)
    rule = "It is the number of rows of a table that a replica sends in a round. Write rows: 1024."
    check_option(is_whole(rows, 1), "sparse_rows.rows", rows, rule)
    rule = "It is a fraction of the bytes of sum, or null. Write most: 1."
    check_option(most is None or (is_number(most) and most > 0), "sparse_rows.most", most, rule)


def _check_named(pattern: str, added: Sequence[ReducedLeaf]) -> None:
    matched = [x for x in added if re.fullmatch(pattern, x.path)]
    if not matched:
        largest = sorted((x for x in added if len(x.shape) > 1), key=lambda x: -x.shape[0])[:3]
        known = f" The leaves with the most rows are {', '.join(repr(x.path) for x in largest)}." if largest else ""
        raise ConfigError(
            f"sparse_rows.leaves: {pattern!r} matches no leaf that is reduced over replicas.{known} Write such a "
            "path, or reducer: sum."
        )
    if short := next((x for x in matched if len(x.shape) < 2 or not x.size), None):
        raise ConfigError(
            f"sparse_rows.leaves: {pattern!r} matches {short.path!r}, {list(short.shape)} on a device, which has no "
            "rows. Name tables only, [rows, width]."
        )


def _check_table(table: ReducedLeaf, rows: int, most: float | None) -> None:
    if most is None or _round_bytes(table, rows) < most * table.allreduce_bytes:
        return
    halves = (rows >> i for i in range(1, rows.bit_length()))
    fitting = next((n for n in halves if _round_bytes(table, n) < most * table.allreduce_bytes), None)
    repair = f"rows: {fitting}, or remove it from leaves" if fitting else "reducer: sum, or remove it from leaves"
    raise ConfigError(
        f"reducer: sparse_rows with rows: {rows} on {table.num} replicas: {table.path!r} is {list(table.shape)} on a "
        f"device, and one round sends {_round_bytes(table, rows) / table.allreduce_bytes:.2f} of the bytes of sum; the "
        f"limit is {most:g} (most). Try {repair}."
    )


def _check_first(table: ReducedLeaf, rows: int, most: float | None, rounds: float) -> None:
    rounds = round(rounds)
    if most is None or rounds * _round_bytes(table, rows) < most * table.allreduce_bytes:
        return
    at_least = (rounds - 1) * min(rows, table.shape[0]) + 1
    share = rounds * _round_bytes(table, rows) / table.allreduce_bytes
    raise ConfigError(
        f"reducer: sparse_rows: in the first batch a replica's gradient of {table.path!r} has {at_least:,} touched "
        f"rows of {table.shape[0]:,} or more on a device: it is dense, and {rounds} rounds of {rows} rows send "
        f"{share:.2f} of the bytes of sum (most: {most:g}). sparse_rows does not suit a table that is also the head "
        "of the model, or one with fewer rows than a batch has tokens. Remove it from sparse_rows.leaves, or write "
        "reducer: sum."
    )
