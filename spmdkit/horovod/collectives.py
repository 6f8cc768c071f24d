"""The collectives behind the operations: one compiled program for each kind, over a mesh of one device of each rank.

Wire, per rank, N ranks, B bytes of the array: allreduce `2 (N-1)/N B`, with Product or Adasum `(N-1) B`; allgather
`(N-1)` times the longest part; broadcast `2 (N-1)/N B` (a sum of bits with zeros, so that every bit is preserved);
alltoall and reducescatter `(N-1)` times the longest part: reducescatter is an all_to_all and a local sum, since one
psum_scatter over Gloo makes later all-reduces a hundred times slower (jax 0.10.2).
"""

from __future__ import annotations

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
MOST_PROGRAMS = 256  # an allgather of other sizes is another program
Wants = dict[int, dict[str, Any] | None]


class Wire:
    """The programs of one process set, compiled at first use.

    Args:
        ranks: the processes of the set.
        rank: this process.
    """

    def __init__(self, ranks: Sequence[int], rank: int):
        first: dict[int, jax.Device] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self._num, self._index, self._ranks = len(ranks), list(ranks).index(rank), list(ranks)
        self._device = first[rank]
        self._mesh = compat.auto_mesh(np.array([first[r] for r in ranks]), (AXIS,))
        self._programs: dict[Any, Callable[..., Any]] = {}

    def run(self, arrays: list[jax.Array] | None, by_rank: Wants) -> Any:
        """Returns the result of an operation that all ranks have requested. `arrays` None: this rank has joined and
        contributes zeros."""
        want = next(want for want in by_rank.values() if want is not None)
        if arrays is None:
            shapes = zip(want.get("shapes") or (), want.get("dtypes") or (), strict=True)
            arrays = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
        run: Callable[..., Any] = getattr(self, f"_{want['op']}")
        return run(arrays, want, by_rank)

    def _allreduce(self, arrays: list[jax.Array], want: dict[str, Any], by_rank: Wants) -> list[jax.Array]:
        how, prescale, postscale = want["reduce"], want["prescale"], want["postscale"]
        divisor = self._num if how == "Average" else 1
        arrays = [scaled_on_host(x, prescale) for x in arrays]
        key = ("allreduce", how, prescale, postscale)

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            parts = [scaled(x, prescale) for x in parts]
            return [scaled(x, postscale, divisor) for x in reduced(parts, how)]

        return [scaled_on_host(x, postscale, divisor) for x in self._call(key, body, arrays)]

    def _allgather(self, arrays: list[jax.Array], want: dict[str, Any], by_rank: Wants) -> list[jax.Array]:
        sizes = [[s["own_shapes"][i][0] for s in by_rank.values() if s is not None] for i in range(len(arrays))]
        padded = [padded_to(x, max(each)) for x, each in zip(arrays, sizes, strict=True)]

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            whole = [of_all(x) for x in parts]
            return [
                jnp.concatenate([x[i, :size] for i, size in enumerate(each)])
                for x, each in zip(whole, sizes, strict=True)
            ]

        return self._call(("allgather", str(sizes)), body, padded)

    def _broadcast(self, arrays: list[jax.Array], want: dict[str, Any], by_rank: Wants) -> list[jax.Array]:
        root = self._ranks.index(want["root"])

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            bits = [as_bits(x, always=True) for x in parts]
            mine = [jnp.where(lax.axis_index(AXIS) == root, x, jnp.zeros_like(x)) for x in bits]
            return [as_dtype(y, x.dtype) for x, y in zip(parts, lax.psum(mine, AXIS), strict=True)]

        return self._call(("broadcast", root), body, arrays)

    def _alltoall(self, arrays: list[jax.Array], want: dict[str, Any], by_rank: Wants) -> tuple[jax.Array, jax.Array]:
        splits = np.array([s["splits"] for s in by_rank.values() if s is not None])  # [from, to]
        most = max(1, int(splits.max()))
        send, receive = splits[self._index], splits[:, self._index]
        begins = np.cumsum(send) - send
        rows = np.concatenate(
            [begin + np.minimum(np.arange(most), max(0, n - 1)) for begin, n in zip(begins, send, strict=True)]
        )
        x = arrays[0] if arrays[0].shape[0] else jnp.zeros((1, *arrays[0].shape[1:]), arrays[0].dtype)
        buffer = jnp.take(x, np.minimum(rows, x.shape[0] - 1), axis=0)

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            moved = lax.all_to_all(as_bits(parts[0]), AXIS, 0, 0, tiled=True)
            return [as_dtype(moved, parts[0].dtype)]

        (moved,) = self._call(("alltoall",), body, [buffer], is_cut=True)
        kept = np.concatenate([i * most + np.arange(n) for i, n in enumerate(receive)]).astype(np.int32)
        return jnp.take(moved, kept, axis=0), jnp.asarray(receive, jnp.int32)

    def _reducescatter(self, arrays: list[jax.Array], want: dict[str, Any], by_rank: Wants) -> list[jax.Array]:
        how, prescale, postscale = want["reduce"], want["prescale"], want["postscale"]
        divisor = self._num if how == "Average" else 1
        sizes = [shares(x.shape[0], self._num)[self._index] for x in arrays]
        arrays = [scaled_on_host(x, prescale) for x in arrays]

        def body(parts: list[jax.Array]) -> list[jax.Array]:
            out = []
            for x in parts:
                each = shares(x.shape[0], self._num)
                most = max(1, each[0])
                begins = np.cumsum(each) - each
                rows = np.concatenate([np.minimum(begin + np.arange(most), max(0, x.shape[0] - 1)) for begin in begins])
                whole = x if x.shape[0] else jnp.zeros((1, *x.shape[1:]), x.dtype)
                buffer = scaled(jnp.take(whole, rows, axis=0), prescale)
                moved = as_dtype(lax.all_to_all(as_bits(buffer), AXIS, 0, 0, tiled=True), x.dtype)
                total = moved.reshape(self._num, most, *x.shape[1:]).sum(0, dtype=x.dtype)
                out.append(scaled(total, postscale, divisor))
            return out

        totals = self._call(("reducescatter", how, prescale, postscale), body, arrays, is_cut=True)
        return [scaled_on_host(x[:rows], postscale, divisor) for x, rows in zip(totals, sizes, strict=True)]

    def _barrier(self, arrays: list[jax.Array], want: dict[str, Any], by_rank: Wants) -> None:
        return None  # the round itself

    _add_process_set = _remove_process_set = _barrier

    def _call(self, key: Any, body: Callable[..., Any], arrays: Sequence[jax.Array], is_cut: bool = False) -> Any:
        """Returns this rank's results of `body` on one array of each rank; the same on each rank unless `is_cut`."""
        if key not in self._programs:

            def program(*wholes: jax.Array) -> Any:
                results = body([x[0] for x in wholes])
                return [x[None] for x in results] if is_cut else results

            out = PartitionSpec(AXIS) if is_cut else PartitionSpec()
            mapped = jax.shard_map(program, mesh=self._mesh, in_specs=PartitionSpec(AXIS), out_specs=out)
            if len(self._programs) >= MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = jax.jit(mapped)
        cut = NamedSharding(self._mesh, PartitionSpec(AXIS))
        wholes = []
        for x in arrays:
            mine = jax.device_put(x, self._device).reshape(1, *x.shape)
            wholes.append(jax.make_array_from_single_device_arrays((self._num, *x.shape), cut, [mine]))
        parts = [y.addressable_shards[0].data for y in self._programs[key](*wholes)]
        return [y[0] for y in parts] if is_cut else parts


def shares(size: int, num: int) -> list[int]:
    """Returns the number of rows of each rank in a reducescatter; the first ranks have one more if rows do not divide
    evenly."""
    return [size // num + (i < size % num) for i in range(num)]


def reduced(parts: list[jax.Array], how: str) -> list[jax.Array]:
    """Returns the reductions over the ranks, inside of the mesh; Average is a sum, divided later."""
    if how in ("Sum", "Average"):
        return list(lax.psum(parts, AXIS))
    if how == "Min":
        return list(lax.pmin(parts, AXIS))
    if how == "Max":
        return list(lax.pmax(parts, AXIS))
    every = [of_all(x) for x in parts]
    if how == "Product":
        return [x.prod(0, dtype=x.dtype) for x in every]
    return [adasum(x) for x in every]


def of_all(x: jax.Array) -> jax.Array:
    """Returns the arrays of all ranks [ranks, ...], inside of the mesh, typed as the same on each."""
    return as_dtype(compat.all_gather_invarying(as_bits(x)[None], (AXIS,)), x.dtype)


def adasum(every: jax.Array) -> jax.Array:
    """Returns the Adasum of `every` [ranks, ...]: neighbors first, then pairs of pairs, bitwise the same on every rank.

        a + b -> (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

    The sum of orthogonal arrays, the mean of equal ones. Source: Maleki et al., "Scaling distributed training with
    adaptive summation" (2021); horovod/common/ops/adasum/adasum.h, which uses a coefficient of one for a norm of zero.
    """
    wide = jnp.promote_types(every.dtype, jnp.float32)
    rows = [x.astype(wide) for x in every]
    largest = jnp.maximum(
        jnp.abs(every.astype(wide)).max(), jnp.finfo(wide).tiny
    )  # squares neither overflow nor vanish
    rows = [x / largest for x in rows]
    while len(rows) > 1:
        rows = [_pair(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return (rows[0] * largest).astype(every.dtype)


def _pair(a: jax.Array, b: jax.Array) -> jax.Array:
    # Each is scaled by its own size before squaring: otherwise the product of two very different sizes underflows.
    size_a, size_b = (jnp.maximum(jnp.abs(x).max(), jnp.finfo(x.dtype).tiny) for x in (a, b))
    u, v = a / size_a, b / size_b
    dot, uu, vv = (u * v).sum(), (u * u).sum(), (v * v).sum()
    # a.b / 2|a|^2 = half_projection(dot, uu) * size_b / size_a
    return a + b - half_projection(dot, uu) * size_b * u - half_projection(dot, vv) * size_a * v


def scaled(x: jax.Array, factor: float, divisor: int = 1) -> jax.Array:
    """Returns `x * factor / divisor` of floating point; half in float32. Integers are scaled on the host."""
    if not jnp.issubdtype(x.dtype, jnp.inexact) or (factor == 1.0 and divisor == 1):
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide if factor == 1.0 else wide * np.asarray(factor, wide.dtype)
    return (wide if divisor == 1 else wide / np.asarray(divisor, wide.dtype)).astype(x.dtype)


def scaled_on_host(x: jax.Array, factor: float, divisor: int = 1) -> jax.Array:
    """Returns integers scaled in float64 and truncated, as Horovod does; floating point unchanged."""
    if jnp.issubdtype(x.dtype, jnp.inexact) or (factor == 1.0 and divisor == 1):
        return x
    whole = np.asarray(x)
    if factor == 1.0:
        quotient = np.abs(whole) // divisor  # exact also beyond 2^53
        return jnp.asarray((np.sign(whole) * quotient).astype(x.dtype))
    return jnp.asarray((whole.astype(np.float64) * (factor / divisor)).astype(x.dtype))


def padded_to(x: jax.Array, rows: int) -> jax.Array:
    """Returns `x` padded with rows of zeros."""
    if x.shape[0] == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], *x.shape[1:]), x.dtype)])


def as_bits(x: jax.Array, always: bool = False) -> jax.Array:
    """Returns arrays that move without arithmetic as integers: XLA's CPU backend would widen narrow floats, and a sum
    would change bits.

    `always`: wide floats too.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return as_bits(jnp.stack([x.real, x.imag], -1), always)
    if jnp.issubdtype(x.dtype, jnp.floating) and (always or x.dtype.itemsize < 4):
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return x


def as_dtype(bits: jax.Array, dtype: Any) -> jax.Array:
    """Returns the input of `as_bits`."""
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = as_dtype(bits, np.zeros(0, dtype).real.dtype)
        return lax.complex(real[..., 0], real[..., 1])
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
