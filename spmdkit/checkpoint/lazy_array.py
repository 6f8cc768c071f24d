"""`LazyArray`: an array in a file, or a rearrangement of such arrays. A read of a slice reads only that slice.

qkv = stack([read(f"h.{i}.attn.c_attn.weight") for i in range(12)])   # [12, 768, 2304]
q, k, v = qkv.split(3, dim=-1)                                        # [12, 768, 768] each
q.reshape(12, 768, 12, 64).slice((slice(0, 3), ...))                  # reads three layers
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import describe

Box = tuple[slice, ...]
"""One slice per dim, with start and stop."""


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array that is not in memory.

    Attributes:
        name: the array in messages.
        fetch: reads a box, which is not empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[Box], np.ndarray] = dataclasses.field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name} {describe(self)}"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def read(self, index: Any = ...) -> np.ndarray:
        """Returns a slice of the array in memory; default: the whole array."""
        box, shape = self._box(index)
        return self.fetch(box) if math.prod(shape) else np.zeros(shape, self.dtype)

    def _box(self, index: Any) -> tuple[Box, tuple[int, ...]]:
        index = index if isinstance(index, tuple) else (index,)
        if ... in index:
            i = index.index(...)
            index = (*index[:i], *[slice(None)] * (self.ndim - len(index) + 1), *index[i + 1 :])
        index = (*index, *[slice(None)] * (self.ndim - len(index)))
        if len(index) > self.ndim or not all(isinstance(x, slice) and x.step in (None, 1) for x in index):
            raise ConfigError(f"{self}: index {index}. It takes at most {self.ndim} slices without a step.")
        bounds = [x.indices(size) for x, size in zip(index, self.shape, strict=True)]
        box = tuple(slice(start, max(start, stop)) for start, stop, _ in bounds)
        return box, tuple(x.stop - x.start for x in box)

    def __getitem__(self, index: Any) -> LazyArray:
        """Returns a part of the array: slices without a step."""
        outer, shape = self._box(index)
        starts = [x.start for x in outer]

        def fetch(box: Box) -> np.ndarray:
            return self.fetch(tuple(slice(x.start + i, x.stop + i) for x, i in zip(box, starts, strict=True)))

        return LazyArray(self.name, shape, self.dtype, fetch)

    def at(self, i: int) -> LazyArray:
        """Returns element `i` of the first dim."""
        return self[i : i + 1].reshape(*self.shape[1:])

    @classmethod
    def of(cls, name: str, array: Any) -> LazyArray:
        """Returns an array that is in memory."""
        array = np.asarray(array)
        return cls(name, array.shape, array.dtype, array.__getitem__)

    def split(self, num: int, dim: int = 0) -> list[LazyArray]:
        """Returns `num` equal parts along a dim."""
        dim = self._dim(dim)
        size, rest = divmod(self.shape[dim], num)
        if rest:
            raise ConfigError(f"{self}: split of dim {dim} into {num} parts. {num} must divide {self.shape[dim]}.")
        before = [slice(None)] * dim
        return [self[(*before, slice(i * size, (i + 1) * size))] for i in range(num)]

    def transpose(self, *dims: int) -> LazyArray:
        """Returns the array with its dims in another order; default: reversed."""
        order = tuple(map(self._dim, dims)) or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise ConfigError(f"{self}: transpose to dims {dims}. It needs each of the {self.ndim} dims once.")
        back = [order.index(i) for i in range(self.ndim)]

        def fetch(box: Box) -> np.ndarray:
            return self.fetch(tuple(box[i] for i in back)).transpose(order)

        return LazyArray(self.name, tuple(self.shape[i] for i in order), self.dtype, fetch)

    @property
    def T(self) -> LazyArray:
        """The array with its dims reversed."""
        return self.transpose()

    def reshape(self, *shape: int) -> LazyArray:
        """Returns the array with another shape; one size may be -1. Dims that are merged or split are read in full
        rows of their first dim."""
        known = math.prod(size for size in shape if size != -1)
        new = tuple(math.prod(self.shape) // max(known, 1) if size == -1 else size for size in shape)
        if shape.count(-1) > 1 or math.prod(new) != math.prod(self.shape):
            raise ConfigError(f"{self}: reshape to {list(shape)}. The number of elements must not change.")
        if not math.prod(new):
            return LazyArray(self.name, new, self.dtype, self.fetch)
        groups = _groups((1, *self.shape), (1, *new))

        def fetch(box: Box) -> np.ndarray:
            boxes, flat, cut, rows, inner = list[slice](), list[int](), list[slice](), list[int](), list[slice]()
            index, done = (slice(0, 1), *box), 0
            for old, sizes in groups:
                first, *others = index[done : done + len(sizes)]
                row, old_row = math.prod(sizes[1:]), math.prod(old[1:])
                start, stop = first.start * row // old_row, -(-first.stop * row // old_row)
                boxes += [slice(start, stop), *(slice(0, size) for size in old[1:])]
                flat.append((stop - start) * old_row)
                cut.append(slice(first.start * row - start * old_row, first.stop * row - start * old_row))
                rows += [first.stop - first.start, *sizes[1:]]
                inner += [slice(None), *others]
                done += len(sizes)
            read = self.fetch(tuple(boxes[1:])).reshape(flat)[tuple(cut)].reshape(rows)
            return read[tuple(inner)][0]  # type: ignore[no-any-return]

        return LazyArray(self.name, new, self.dtype, fetch)

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= operator.index(dim) < self.ndim:
            raise ConfigError(f"{self}: no dim {dim}. It has {self.ndim} dims, from 0 on.")
        return dim % self.ndim


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns the dims of both shapes in groups of equal size, in order. The sizes of the shapes are equal, not 0."""
    groups, i, j = list[tuple[list[int], list[int]]](), 0, 0
    while i < len(old) and j < len(new):
        a, b = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while math.prod(a) != math.prod(b):
            if math.prod(a) < math.prod(b):
                a.append(old[i])
                i += 1
            else:
                b.append(new[j])
                j += 1
        groups.append((a, b))
    groups[-1][0].extend(old[i:])  # of size 1
    groups[-1][1].extend(new[j:])
    return groups


def stack(arrays: Sequence[LazyArray], dim: int = 0) -> LazyArray:
    """Returns arrays of one shape, stacked along a new dim."""
    first = _same(arrays, "stack", None)
    at = LazyArray(first.name, (*first.shape, 1), first.dtype, first.fetch)._dim(dim)

    def fetch(box: Box) -> np.ndarray:
        inner = (*box[:at], *box[at + 1 :])
        return np.stack([array.fetch(inner) for array in arrays[box[at]]], at)

    shape = (*first.shape[:at], len(arrays), *first.shape[at:])
    return LazyArray(f"{first.name} ...", shape, first.dtype, fetch)


def concatenate(arrays: Sequence[LazyArray], dim: int = 0) -> LazyArray:
    """Returns arrays joined along a dim."""
    first = _same(arrays, "concatenate", dim)
    at = first._dim(dim)
    ends = np.cumsum([array.shape[at] for array in arrays]).tolist()

    def fetch(box: Box) -> np.ndarray:
        parts = []
        for array, end in zip(arrays, ends, strict=True):
            begin = end - array.shape[at]
            start, stop = max(box[at].start, begin), min(box[at].stop, end)
            if start < stop:
                parts.append(array.fetch((*box[:at], slice(start - begin, stop - begin), *box[at + 1 :])))
        return np.concatenate(parts, at)

    shape = (*first.shape[:at], ends[-1], *first.shape[at + 1 :])
    return LazyArray(f"{first.name} ...", shape, first.dtype, fetch)


def _same(arrays: Sequence[LazyArray], what: str, dim: int | None) -> LazyArray:
    """Returns the first array. Raises ConfigError if others differ in dtype, or in shape outside of `dim`."""
    if not arrays:
        raise ConfigError(f"{what}: no arrays. Pass at least one.")
    first = arrays[0]
    at = None if dim is None else first._dim(dim)
    outside: Callable[[LazyArray], Any] = lambda x: (x.dtype, x.ndim, [n for i, n in enumerate(x.shape) if i != at])
    for array in arrays:
        if outside(array) != outside(first):
            raise ConfigError(f"{what}: {first} and {array} differ. They must have one dtype and equal shapes.")
    return first
