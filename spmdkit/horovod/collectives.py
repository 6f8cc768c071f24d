"""The collectives of the operations: one compiled program for each kind, over a mesh with one device per rank.

Wire, per rank, N ranks, B bytes of the array: allreduce `2 (N-1)/N B`, with Product or Adasum `(N-1) B`; allgather
`(N-1)` times the longest part; broadcast `2 (N-1)/N B` (a sum of bits with zeros, so that every bit is preserved);
alltoall and reducescatter `(N-1)` times the longest part: reducescatter is an all_to_all and a local sum, since one
psum_scatter over Gloo makes later all-reduces a hundred times slower (jax 0.10.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.communication.reducers.adasum import half_projection

AXIS = "rank"
MAX_PROGRAMS = 256  # an allgather with other sizes needs another program
Requests = dict[int, dict[str, Any] | None]


class Wire:
    """The compiled programs of one process set. `rank`: this process."""

    def __init__(self, ranks: Sequence[int], rank: int):
        first: dict[int, jax.Device] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self._num, self._index, self._ranks = len(ranks), list(ranks).index(rank), list(ranks)
        self._device = first[rank]
        self._mesh = compat.auto_mesh(np.array([first[r] for r in ranks]), (AXIS,))
        self._programs = _programs(tuple(ranks))

    def run(self, arrays: list[jax.Array] | None, by_rank: Requests) -> Any:
        """Returns the result of an operation that all ranks have requested. `arrays` None: this rank has joined and
        contributes zeros."""
        request = next(request for request in by_rank.values() if request is not None)
        if arrays is None:
            shapes = zip(request.get("shapes") or (), request.get("dtypes") or (), strict=True)
            arrays = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
        run: Callable[..., Any] = getattr(self, f"_{request['op']}")
        return run(arrays, request, by_rank)

    def _allreduce(self, arrays: list[jax.Array], request: dict[str, Any], by_rank: Requests) -> list[jax.Array]:
        how, prescale, postscale = request["reduce"], request["prescale"], request["postscale"]
        divisor = self._num if how == "Average" else 1
        arrays = [scaled_on_host(x, prescale) for x in arrays]
        key = ("allreduce", how, prescale, postscale)

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            parts = [scaled(x, prescale) for x in parts]
            return [scaled(x, postscale, divisor) for x in reduced(parts, how)]

        return [scaled_on_host(x, postscale, divisor) for x in self._call(key, body, arrays)]

    def _allgather(self, arrays: list[jax.Array], request: dict[str, Any], by_rank: Requests) -> list[jax.Array]:
        sizes = [[s["own_shapes"][i][0] for s in by_rank.values() if s is not None] for i in range(len(arrays))]
        missing = [max(each) - x.shape[0] for x, each in zip(arrays, sizes, strict=True)]
        pad: Callable[[jax.Array, int], jax.Array] = lambda x, n: (
            jnp.pad(x, [(0, n), *[(0, 0)] * (x.ndim - 1)]) if n else x
        )
        padded = [pad(x, n) for x, n in zip(arrays, missing, strict=True)]

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            whole = [of_all(x) for x in parts]
            return [
                jnp.concatenate([x[i, :size] for i, size in enumerate(counts)])
                for x, counts in zip(whole, sizes, strict=True)
            ]

        return self._call(("allgather", str(sizes)), body, padded)

    def _broadcast(self, arrays: list[jax.Array], request: dict[str, Any], by_rank: Requests) -> list[jax.Array]:
        root = self._ranks.index(request["root"])

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            bits = [as_bits(x, always=True) for x in parts]
            mine = [jnp.where(lax.axis_index(AXIS) == root, x, jnp.zeros_like(x)) for x in bits]
            return [as_dtype(y, x.dtype) for x, y in zip(parts, lax.psum(mine, AXIS), strict=True)]

        return self._call(("broadcast", root), body, arrays)

    def _alltoall(
        self, arrays: list[jax.Array], request: dict[str, Any], by_rank: Requests
    ) -> tuple[jax.Array, jax.Array]:
        splits = np.array([s["splits"] for s in by_rank.values() if s is not None])  # [from, to]
        most, receive = max(1, int(splits.max())), splits[:, self._index]
        blocks = _blocks(arrays[0], splits[self._index], most)
        (moved,) = self._call(("alltoall",), lambda parts: [_exchanged(parts[0])], [blocks], is_sharded=True)
        valid = np.concatenate([i * most + np.arange(n) for i, n in enumerate(receive)]).astype(np.int32)
        return jnp.take(moved, valid, axis=0), jnp.asarray(receive, jnp.int32)

    def _reducescatter(self, arrays: list[jax.Array], request: dict[str, Any], by_rank: Requests) -> list[jax.Array]:
        how, prescale, postscale = request["reduce"], request["prescale"], request["postscale"]
        divisor = self._num if how == "Average" else 1
        arrays = [scaled_on_host(x, prescale) for x in arrays]

        def shares(x: jax.Array) -> np.ndarray:
            """Returns the number of rows of each rank. The first ranks have one more if rows do not divide evenly."""
            return x.shape[0] // self._num + (np.arange(self._num) < x.shape[0] % self._num)

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            moved = [_exchanged(scaled(_blocks(x, shares(x), max(1, shares(x)[0])), prescale)) for x in parts]
            totals = [x.reshape(self._num, -1, *x.shape[1:]).sum(0, dtype=x.dtype) for x in moved]
            return [scaled(x, postscale, divisor) for x in totals]

        totals = self._call(("reducescatter", how, prescale, postscale), body, arrays, is_sharded=True)
        rows = [shares(x)[self._index] for x in arrays]
        return [scaled_on_host(x[:n], postscale, divisor) for x, n in zip(totals, rows, strict=True)]

    def _barrier(self, arrays: list[jax.Array], request: dict[str, Any], by_rank: Requests) -> None:
        return None  # the negotiation round is the barrier

    _add_process_set = _remove_process_set = _barrier

    def _call(
        self, key: Any, body: Callable[..., Any], arrays: Sequence[jax.Array], is_sharded: bool = False
    ) -> list[jax.Array]:
        """Returns the results of `body` for this rank's arrays. `is_sharded`: the results differ between ranks."""
        scalars = [x.ndim == 0 for x in arrays]
        key = (key, *scalars)
        if key not in self._programs:

            def program(*parts: jax.Array) -> Any:
                return body([x[0] if scalar else x for x, scalar in zip(parts, scalars, strict=True)])

            out = PartitionSpec(AXIS) if is_sharded else PartitionSpec()
            mapped = jax.shard_map(program, mesh=self._mesh, in_specs=PartitionSpec(AXIS), out_specs=out)
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
            self._programs[key] = jax.jit(mapped)
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        inputs = []
        for x in arrays:
            block = jax.device_put(x if x.ndim else x.reshape(1), self._device)
            shape = (self._num * block.shape[0], *block.shape[1:])
            inputs.append(jax.make_array_from_single_device_arrays(shape, sharding, [block]))
        return [y.addressable_shards[0].data for y in self._programs[key](*inputs)]


@functools.cache
def _programs(ranks: tuple[int, ...]) -> dict[Any, Callable[..., Any]]:
    """Returns the cache of compiled programs for some ranks. It persists across calls of `init`."""
    return {}


def _blocks(x: jax.Array, sizes: np.ndarray, most: int) -> jax.Array:
    """Returns a block of `most` rows for each rank. A block starts with that rank's rows; the rest is ignored."""
    x = x if x.shape[0] else jnp.zeros((1, *x.shape[1:]), x.dtype)
    starts = np.cumsum(sizes) - sizes
    return jnp.take(x, np.minimum(starts[:, None] + np.arange(most), x.shape[0] - 1).ravel(), axis=0)


def _exchanged(blocks: jax.Array) -> jax.Array:
    """Returns the blocks that all ranks sent to this rank, inside the mesh."""
    return as_dtype(lax.all_to_all(as_bits(blocks), AXIS, 0, 0, tiled=True), blocks.dtype)


def reduced(parts: list[jax.Array], how: str) -> list[jax.Array]:
    """Returns the reductions over the ranks, inside the mesh. Average is a sum, divided later."""
    direct: dict[str, Callable[..., Any]] = {"Sum": lax.psum, "Average": lax.psum, "Min": lax.pmin, "Max": lax.pmax}
    if how in direct:
        return list(direct[how](parts, AXIS))
    every = [of_all(x) for x in parts]
    if how == "Product":
        return [x.prod(0, dtype=x.dtype) for x in every]
    return [adasum(x) for x in every]


def of_all(x: jax.Array) -> jax.Array:
    """Returns the arrays of all ranks [ranks, ...], inside the mesh, typed as replicated."""
    return as_dtype(compat.all_gather_invarying(as_bits(x)[None], (AXIS,)), x.dtype)


def adasum(every: jax.Array) -> jax.Array:
    """Returns the Adasum of `every` [ranks, ...]: pairs of neighbors, then pairs of pairs; bitwise equal on every rank.

        a + b -> (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

    It is the sum of orthogonal arrays and the mean of equal ones. Source: Maleki et al., "Scaling distributed training
    with adaptive summation" (2021); horovod/common/ops/adasum/adasum.h, with a coefficient of one for a norm of zero.
    """
    wide = jnp.promote_types(every.dtype, jnp.float32)
    rows = [x.astype(wide) for x in every]
    # Squares of numbers up to one neither overflow nor vanish.
    largest = jnp.maximum(jnp.abs(every.astype(wide)).max(), jnp.finfo(wide).tiny)
    rows = [x / largest for x in rows]
    while len(rows) > 1:
        rows = [_pair(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    combined: jax.Array = rows[0] * largest
    return combined.astype(every.dtype)


def _pair(a: jax.Array, b: jax.Array) -> jax.Array:
    # Each is scaled by its own size before squaring: otherwise the product of two very different sizes underflows.
    size_a, size_b = (jnp.maximum(jnp.abs(x).max(), jnp.finfo(x.dtype).tiny) for x in (a, b))
    u, v = a / size_a, b / size_b
    dot, uu, vv = (u * v).sum(), (u * u).sum(), (v * v).sum()
    # a.b / 2|a|^2 = half_projection(dot, uu) * size_b / size_a
    return a + b - half_projection(dot, uu) * size_b * u - half_projection(dot, vv) * size_a * v


def scaled(x: jax.Array, factor: float, divisor: int = 1) -> jax.Array:
    """Returns `x * factor / divisor` for floats, 16-bit ones in float32. Integers are scaled on the host."""
    if not jnp.issubdtype(x.dtype, jnp.inexact) or (factor == 1.0 and divisor == 1):
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide if factor == 1.0 else wide * np.asarray(factor, wide.dtype)
    return (wide if divisor == 1 else wide / np.asarray(divisor, wide.dtype)).astype(x.dtype)


def scaled_on_host(x: jax.Array, factor: float, divisor: int = 1) -> jax.Array:
    """Returns integers scaled in float64 and truncated, as in Horovod; floating point is unchanged."""
    if jnp.issubdtype(x.dtype, jnp.inexact) or (factor == 1.0 and divisor == 1):
        return x
    whole = np.asarray(x)
    if factor == 1.0:
        quotient = np.abs(whole) // divisor  # exact also beyond 2^53
        return jnp.asarray((np.sign(whole) * quotient).astype(x.dtype))
    return jnp.asarray((whole.astype(np.float64) * (factor / divisor)).astype(x.dtype))


def as_bits(x: jax.Array, always: bool = False) -> jax.Array:
    """Returns arrays as integers, for transfers without arithmetic: XLA's CPU backend would widen narrow floats, and a
    sum would change bits. `always`: also wide floats."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return as_bits(jnp.stack([x.real, x.imag], -1), always)
    if jnp.issubdtype(x.dtype, jnp.floating) and (always or x.dtype.itemsize < 4):
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return x


def as_dtype(bits: jax.Array, dtype: Any) -> jax.Array:
    """Inverts `as_bits`."""
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = as_dtype(bits, np.zeros(0, dtype).real.dtype)
        return lax.complex(real[..., 0], real[..., 1])
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
