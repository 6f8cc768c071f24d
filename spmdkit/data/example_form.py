"""The form of the examples of one data set: the structure, shapes and dtypes of the first example."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from spmdkit.data.dtypes import device_dtype, narrow
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves

INT32, INT64, FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


class ExampleForm:
    """The form of examples, or of the rows of chunks.

    Args:
        where: names an example in errors, with the place of the example for `{}`: `train_data[{}]`.
        place: the place of `example`.
        example: the first example, or with `batched` the first chunk.
        code, unit: the user's code that returns examples and what it returns them for, in the repair of an error.
        batched: examples are chunks; the first dim of each leaf counts rows.
    """

    def __init__(
        self,
        where: str,
        place: int,
        example: Any,
        code: str = "__getitem__",
        unit: str = "index",
        batched: bool = False,
    ):
        self._where, self._code, self._unit, self._batched = where, code, unit, batched
        self._treedef: Any = jax.tree.structure(example)
        if not (leaves := named_leaves(example)):
            raise ConfigError(
                f"{where.format(place)} is {example!r}, which holds no array. Return at least one array per example."
            )
        self._names = [f" leaf '{path}'" if path else "" for path, _ in leaves]
        self._refuse_lists_of_numbers(place, example)
        arrays = [self._array(place, name, leaf) for name, (_, leaf) in zip(self._names, leaves, strict=True)]
        self._num_rows(place, arrays)
        self.specs = [
            jax.ShapeDtypeStruct(array.shape[1:] if batched else array.shape, array.dtype) for array in arrays
        ]
        self._flat = type(example) if type(example) in (dict, tuple) else None
        keys = sorted(example) if self._flat is dict else range(len(example)) if self._flat is tuple else []
        if len(keys) != len(self.specs):  # nested, or None
            keys = []
        self._of_keys = [(key, spec.dtype, spec.shape) for key, spec in zip(keys, self.specs, strict=False)]

    def element(self) -> Any:
        """Returns a pytree of `jax.ShapeDtypeStruct` of one example."""
        return self.tree(self.specs)

    def tree(self, leaves: list[Any]) -> Any:
        """Returns leaves in the structure of an example."""
        return self._treedef.unflatten(leaves)

    def empty(self, num: int) -> list[np.ndarray]:
        """Returns uninitialized leaves for `num` examples."""
        return [np.empty((num, *spec.shape), spec.dtype) for spec in self.specs]

    def leaves(self, place: int, example: Any) -> list[np.ndarray]:
        """Returns the leaves of an example, or of a chunk, as arrays of the form. Raises ConfigError if they differ."""
        leaves, treedef = jax.tree.flatten(example)
        if treedef != self._treedef:
            raise ConfigError(
                f"{self._where.format(place)} has the structure {treedef}, and example 0 has {self._treedef}. Every "
                "example must have the same structure, because a compiled step has one. Return the same keys for every "
                f"{self._unit}."
            )
        arrays = []
        for name, leaf, spec in zip(self._names, leaves, self.specs, strict=True):
            if type(leaf) is np.ndarray and leaf.dtype == spec.dtype and self._shape(leaf) == spec.shape:
                arrays.append(leaf)  # the common case, and the only one that takes less than a microsecond
                continue
            array = self._array(place, name, leaf)
            if self._shape(array) != spec.shape or array.dtype != spec.dtype:
                raise ConfigError(
                    f"{self._where.format(place)}{name} is {array.dtype}{list(self._shape(array))}, and in example 0 "
                    f"it is {spec.dtype}{list(spec.shape)}. Every example must have the same shapes and dtypes, "
                    f"because a compiled step has one. Pad or crop to one length, or cast, in {self._code}."
                )
            arrays.append(array)
        return arrays

    def write(self, place: int, example: Any, out: list[np.ndarray], row: int) -> None:
        """Copies an example into row `row` of `out`. Raises ConfigError as `leaves`."""
        # A flat dict or tuple, without the 2 us in which JAX flattens it.
        if type(example) is self._flat and len(example) == len(self._of_keys) > 0:
            get = example.get if self._flat is dict else example.__getitem__
            for (key, dtype, shape), array in zip(self._of_keys, out):  # noqa: B905 - strict takes 0.1 us
                leaf = get(key)
                if type(leaf) is np.ndarray and leaf.dtype is dtype and leaf.shape == shape:
                    array[row] = leaf
                elif not _write_converted(leaf, dtype, shape, array, row):
                    break
            else:
                return
        write_row(out, row, self.leaves(place, example))

    def chunk(self, place: int, chunk: Any) -> tuple[list[np.ndarray], int]:
        """Returns (the leaves of a chunk, the number of its rows)."""
        leaves = self.leaves(place, chunk)
        return leaves, self._num_rows(place, leaves)

    def _shape(self, array: np.ndarray) -> tuple[int, ...]:
        return array.shape[1:] if self._batched else array.shape

    def _num_rows(self, place: int, leaves: list[np.ndarray]) -> int:
        if not self._batched:
            return 1
        if any(leaf.ndim == 0 for leaf in leaves) or len({len(leaf) for leaf in leaves}) > 1:
            shapes = ", ".join(
                f"{name.strip() or 'it'} {list(x.shape)}" for name, x in zip(self._names, leaves, strict=True)
            )
            raise ConfigError(
                f"{self._where.format(place)} has the shapes {shapes}. With data.batched: true an example is a chunk: "
                "the first dim of every leaf counts the same rows. Return such arrays, or set data.batched: false."
            )
        return len(leaves[0])

    def _array(self, place: int, name: str, leaf: Any) -> np.ndarray:
        where = f"{self._where.format(place)}{name}"
        try:
            array = np.asarray(leaf, np.int64 if type(leaf) is int else None)
        except OverflowError as error:
            raise ConfigError(f"{where} is {leaf}, which does not fit 64 bits. Use a smaller number.") from error
        except Exception as error:
            raise ConfigError(
                f"{where} is a {type(leaf).__name__}, which numpy cannot read ({error}). An example is a pytree of "
                f"arrays and numbers. Convert it in {self._code}."
            ) from error
        if type(leaf) in (bool, int, float, complex):
            return narrow(where, array, np.dtype(jax.dtypes.canonicalize_dtype(array.dtype)))
        return narrow(where, array, device_dtype(where, array.dtype))

    def _refuse_lists_of_numbers(self, place: int, example: Any) -> None:
        """Rejects a list of numbers. It would be a pytree of scalars: rarely intended, and slow."""
        for node in jax.tree.leaves(example, is_leaf=lambda node: isinstance(node, list)):
            if isinstance(node, list) and any(isinstance(item, (bool, int, float)) for item in node):
                raise ConfigError(
                    f"{self._where.format(place)} holds a Python list of {len(node)} numbers. A leaf of an example "
                    "must be an array or one number. Make it an array: np.asarray(values, np.int32), or np.float32."
                )


def _write_converted(leaf: Any, dtype: np.dtype, shape: tuple[int, ...], out: np.ndarray, row: int) -> bool:
    """Copies a number, or an array of int64 with values that fit, into row `row` of `out`; returns whether it could."""
    of_leaf = getattr(leaf, "dtype", None)
    if of_leaf is None and shape == ():
        in_range = type(leaf) is int and dtype is INT32 and -(2**31) <= leaf < 2**31
        if not in_range and (type(leaf) is not float or dtype is not FLOAT32):
            return False
    elif (of_leaf is not dtype and (of_leaf is not INT64 or dtype is not INT32)) or leaf.shape != shape:
        return False
    out[row] = leaf
    return not (of_leaf is INT64 is not dtype and (out[row] != leaf).any())


def write_row(out: list[np.ndarray], row: int, leaves: list[np.ndarray]) -> None:
    """Copies the leaves of an example into row `row` of `out`."""
    for array, leaf in zip(out, leaves, strict=True):
        array[row] = leaf
