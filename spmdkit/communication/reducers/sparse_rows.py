"""Rows of embedding gradients alone: a step's tokens touch few rows of a table, and only these are sent, with their
numbers. Exact.

    rounds = max_r ceil(touched_r / N)               touched_r: rows of g_r[V D] that are not all zero; one all_reduce
                                                     of a maximum
    in round i: all_gather over the replicas of (row numbers [N], rows [N D])  ->  g[V D] += rows, replica by replica

Each replica sends at most N rows of a table in a round, and as many rounds follow as the replica with the most touched
rows needs: all replicas agree on their number before, so that none waits in a collective that another does not enter.
At most `V / N` rounds, in one loop. What comes out is the sum of all rows, whatever N is; leaves that `leaves` does not
name cross as `sum` has them. The rounds of each table are a metric of the step, `reducer/rounds/PATH`: a number above
one that stays says that N is too small, since each round costs the latency of an all_gather.

Use it for tables with many more rows than a batch has tokens. Not for one whose gradient is dense: one that also is the
head of the model (tied weights), or one under a decay that is added to the gradient. A table whose rounds in the first
batch would send `most` of what `sum` sends is refused.
What is cut over model axes, or scattered by ZeRO 2, goes by the rows that one device holds. With accumulation all
microbatches' rows are touched.
Memory: none. Forward: one all_reduce of a number a table, all_gathers over the replica axes, one all_reduce of the
other leaves. Backward: none.
Wire: a device sends `(n-1) * 4 p` bytes for a table and round, with n replicas and `p = N (D + 1)` rounded up to a
multiple of 1,024, `8 (n-1)/n` for the number of rounds, and `8 (n-1)/n` for each value of other leaves. So `n N (D + 1)
/ (2 V D)` of `sum` for a table in one round.
Source: Horovod, `allreduce` of `tf.IndexedSlices` (all_gather of values and indices); Li et al., "Parallax" (2019),
section 3.1, sparse variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
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
        leaves: patterns for the whole paths of the tables, whose first dim is rows.
        rows: N, of a table that a replica sends in a round.
        most: what the rounds of a table may send in the first batch, as a share of what `sum` sends for it; null:
            anything.

    Raises:
        ConfigError: an option is none of these.
    """
    _check_options(leaves, rows, most)
    patterns = [leaves] if isinstance(leaves, str) else list(leaves)

    def is_table(path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    def tables(given: Leaves, over: ReduceGroup) -> list[int]:
        return [i for i, path in enumerate(over.paths) if is_table(path) and given[i].ndim > 1 and given[i].size]

    def apply_with_metrics(
        given: Leaves, states: list[LeafState], over: ReduceGroup
    ) -> tuple[Leaves, list[LeafState], ReducerMetrics]:
        out, chosen, told = list(given), tables(given, over), dict[str, jax.Array]()
        others = [i for i in range(len(given)) if i not in chosen]
        for i, total in zip(others, lax.psum([given[i] for i in others], over.axes), strict=True):
            out[i] = total
        for i, rounds in zip(chosen, _rounds([given[i] for i in chosen], rows, over), strict=True):
            out[i], name = _summed(given[i], rounds, rows, over), f"rounds/{over.paths[i]}"
            told[name] = jnp.maximum(told.get(name, 0), rounds.astype(jnp.float32))
        return out, states, told

    def wire_of(added: Sequence[ReducedLeaf]) -> float:
        return sum(_of_round(x, rows) if is_table(x.path) and len(x.shape) > 1 else x.allreduce_bytes for x in added)

    def check(added: Sequence[ReducedLeaf]) -> None:
        for pattern in patterns:
            _check_named(pattern, added)
        for table in (x for x in added if is_table(x.path)):
            _check_table(table, rows, most)

    def validate_first_step(added: Sequence[ReducedLeaf], found: Mapping[str, float]) -> None:
        for table in added:
            _check_first(table, rows, most, found.get(f"rounds/{table.path}", 0))

    return Reducer(
        exact=True,
        apply=lambda given, states, over: apply_with_metrics(given, states, over)[:2],
        wire=lambda values, num: 8 * (num - 1) / num * values,
        wire_of=wire_of,
        check=check,
        apply_with_metrics=apply_with_metrics,
        validate_first_step=validate_first_step,
    )


# ---- on the devices
# -----------------------------------------------------------------------------------------------------


def _touched(leaf: jax.Array) -> jax.Array:
    """Returns bool[V], the rows that are not all zero; one with a NaN is touched."""
    return jnp.any(leaf.reshape(leaf.shape[0], -1) != 0, axis=1)


def _rounds(leaves: Sequence[jax.Array], rows: int, over: ReduceGroup) -> list[jax.Array]:
    """Returns int32[] of each leaf, the same on every device of the mesh: all that send in a loop enter it as often."""
    if not leaves:
        return []
    cut = sorted({axis for x in leaves for axis in compat.varying_axes(x)} - set(over.axes))
    num = [-(-_touched(x).sum(dtype=jnp.int32) // min(rows, x.shape[0])) for x in leaves]
    everywhere = (*over.axes, *cut)
    return list(jnp.maximum(lax.pmax(jnp.stack(compat.as_varying(num, everywhere)), everywhere), 1))


def _summed(leaf: jax.Array, rounds: jax.Array, rows: int, over: ReduceGroup) -> jax.Array:
    """Returns the sum of a leaf over the replicas, `rows` touched rows of each in a round."""
    num, rows = leaf.shape[0], min(rows, leaf.shape[0])
    table = leaf.reshape(num, -1).astype(common_dtype(leaf.dtype, jnp.float32))
    places = jnp.sort(jnp.where(_touched(leaf), jnp.arange(num, dtype=jnp.uint32), num))
    places = jnp.pad(places, (0, -num % rows), constant_values=num)  # the touched first; `num` is no row

    def one_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, total = carry
        own = lax.dynamic_slice_in_dim(places, i * rows, rows)
        sent = _packed(own, table.at[own].get(mode="fill", fill_value=0))
        of_all = gather_parts(sent, over.axes).reshape(over.num, -1)
        return i + 1, lax.scan(add, total, of_all)[0]

    def add(total: jax.Array, sent: jax.Array) -> tuple[jax.Array, None]:
        numbers, values = _unpacked(sent, rows, table)
        return total.at[numbers].add(values, mode="drop"), None

    cut = tuple(compat.varying_axes(leaf) - set(over.axes))
    first = 0 * rounds  # of this group alone, as all in the loop is where a `vmap` over groups is around it
    nothing = compat.as_varying(jnp.zeros(table.shape, table.dtype) + first.astype(table.dtype), cut)
    _, total = lax.while_loop(lambda carry: carry[0] < rounds, one_round, (first, nothing))
    return total.reshape(leaf.shape).astype(leaf.dtype)


def _packed(numbers: jax.Array, values: jax.Array) -> jax.Array:
    """Returns uint32[p], the numbers and the bits of the values, with zeros up to a multiple of 1,024."""
    bits = lax.bitcast_convert_type(values, jnp.uint32).reshape(-1)
    row = jnp.concatenate([numbers, bits])
    return jnp.pad(row, (0, -len(row) % PAD))


def _unpacked(sent: jax.Array, rows: int, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (uint32[rows], values [rows, D]) of what a replica has sent."""
    words = table.dtype.itemsize // 4
    bits = sent[rows : rows * (1 + table.shape[1] * words)].reshape(rows, table.shape[1], *[2] * (words == 2))
    return sent[:rows], lax.bitcast_convert_type(bits, table.dtype)


# ---- before the first step, and after it
# ----------------------------------------------------------------------------------


def _of_round(leaf: ReducedLeaf, rows: int) -> float:
    """Returns the bytes that a device sends for a table in one round."""
    words = min(rows, leaf.shape[0]) * (1 + leaf.size // leaf.shape[0] * leaf.value_bytes // 4)
    return (leaf.num - 1) * (4 * (words + -words % PAD) + 8 / leaf.num)


def _check_options(leaves: object, rows: object, most: object) -> None:
    patterns = [leaves] if isinstance(leaves, str) else leaves
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(x, str) for x in patterns):
        raise ConfigError(
            f"sparse_rows.leaves is {leaves!r}. It is a pattern for the whole paths of the tables, or a list of them. Write leaves: [embed]."
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"sparse_rows.leaves: {pattern!r} is no pattern ({error}). It is a regular expression for the whole path of a leaf."
            ) from None
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ConfigError(
            f"sparse_rows.rows is {rows!r}. It is the number of rows of a table that a replica sends in a round. Write rows: 1024."
        )
    is_number = isinstance(most, int | float) and not isinstance(most, bool)
    if most is not None and (not is_number or most <= 0):  # type: ignore[operator]
        raise ConfigError(f"sparse_rows.most is {most!r}. It is a share of the bytes of sum, or null. Write most: 1.")


def _check_named(pattern: str, added: Sequence[ReducedLeaf]) -> None:
    found = [x for x in added if re.fullmatch(pattern, x.path)]
    if not found:
        largest = sorted((x for x in added if len(x.shape) > 1), key=lambda x: -x.shape[0])[:3]
        known = f" Those with the most rows are {', '.join(repr(x.path) for x in largest)}." if largest else ""
        raise ConfigError(
            f"sparse_rows.leaves: {pattern!r} is the whole path of no leaf that is added over replicas.{known} Write such a path, or reducer: sum."
        )
    if short := next((x for x in found if len(x.shape) < 2 or not x.size), None):
        raise ConfigError(
            f"sparse_rows.leaves: {pattern!r} names {short.path!r}, {list(short.shape)} on a device, which has no rows. Name tables alone, [rows, width]."
        )


def _check_table(table: ReducedLeaf, rows: int, most: float | None) -> None:
    if most is None or _of_round(table, rows) < most * table.allreduce_bytes:
        return
    fitting = next((n for n in _smaller(rows) if _of_round(table, n) < most * table.allreduce_bytes), None)
    repair = f"rows: {fitting}, or leave it out of leaves" if fitting else "reducer: sum, or leave it out of leaves"
    raise ConfigError(
        f"reducer: sparse_rows with rows: {rows} on {table.num} replicas: {table.path!r} is {list(table.shape)} on a device, and one round sends "
        f"{_of_round(table, rows) / table.allreduce_bytes:.2f} of what sum sends for it; at most {most:g} is allowed (most). Try {repair}."
    )


def _smaller(rows: int) -> Iterator[int]:
    """Yields half of the rows, a quarter, ..."""
    while rows := rows // 2:
        yield rows


def _check_first(table: ReducedLeaf, rows: int, most: float | None, rounds: float) -> None:
    rounds = round(rounds)
    if most is None or rounds * _of_round(table, rows) < most * table.allreduce_bytes:
        return
    at_least = (rounds - 1) * min(rows, table.shape[0]) + 1
    share = rounds * _of_round(table, rows) / table.allreduce_bytes
    raise ConfigError(
        f"reducer: sparse_rows: in the first batch a replica's gradient of {table.path!r} has {at_least:,} touched rows of {table.shape[0]:,} or more on a "
        f"device: it is dense, and {rounds} rounds of {rows} rows send {share:.2f} of what sum sends for it (most: {most:g}). A table that also is the head of the "
        "model, or one of fewer rows than a batch has tokens, is no case for it. Take it out of sparse_rows.leaves, or write reducer: sum."
    )
