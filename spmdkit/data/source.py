"""`open_source` returns any kind of data as a source that gathers rows by index.

How data is read (the first match applies):
  0. an object that a plug-in of another distribution reads (entry points `spmdkit.data_sources`)
  1. a `grain.MapDataset`                             examples, already transformed by the user
  2. an array                                         arrays; a batch is an array
  3. a list, or an object of a user-defined class     examples: `data[i]` is a pytree for one example. A list is
     with `__len__` and `__getitem__`                 always a sequence of examples; a pair of arrays is a tuple (x, y)
  4. a dict, tuple, named tuple, registered           arrays: every leaf is an array, its first dim counts examples
     dataclass, `np.load("file.npz")`

Arrays in memory take one vectorized `take` per leaf and batch. Memory-mapped arrays are read one batch at a time.
Examples take one call of `data[i]` per row.
"""

from __future__ import annotations

import functools
import mmap
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from spmdkit.data.dtypes import device_dtype, narrow
from spmdkit.data.examples import ExampleSource
from spmdkit.data.per_process import PerProcess
from spmdkit.data.row_errors import DEFAULT_POLICY, ReadPolicy
from spmdkit.data.schedule import Schedule
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import plugins
from spmdkit.foundation.trees import describe, named_leaves


class Source(Protocol):
    """Random access by rows. `gather` may be called from several threads. `ReadPolicy` controls how a user's examples
    are read, by default one at a time."""

    @property
    def in_memory(self) -> bool:
        """Whether `gather` is a copy in memory. Reader threads would then only contend for the interpreter."""

    def __len__(self) -> int:
        """Number of examples."""

    def gather(self, indices: np.ndarray, epoch: int = 0, batch: int | None = None) -> Any:
        """Returns a pytree of numpy arrays with first dim `len(indices)`. `indices` are int64 in [0, len); `batch` is
        the number of their batch."""

    def skipped(self, indices: np.ndarray, batch: int) -> np.ndarray | None:
        """Returns bool[len(indices)], True for rows that `gather` has skipped in this batch, or None if no row may be
        skipped."""

    def element(self) -> Any:
        """Returns a pytree of `jax.ShapeDtypeStruct` of one example, without the batch dim."""


def open_source(data: Any, what: str = "train_data", access: ReadPolicy | None = None) -> Source:
    """Returns `data` as a checked `Source`, read as in the module docstring. `what` names it in errors.

    Args:
      access: how examples of user-defined data are read, by default one at a time; arrays are read by any number of
          threads.

    Raises:
      ConfigError: no data, no random access, leaves of unequal length, or a dtype that devices do not support.
      UserCodeError: the user's `__len__` or `__getitem__(0)` raised.
    """
    if isinstance(data, PerProcess):
        data = data.source
    openers: dict[str, Callable[..., Source | None]] = plugins.load_all("data_sources")
    for open_plugin in openers.values():
        if (source := open_plugin(data, what, access)) is not None:
            return source
    if isinstance(data, ExampleSource) and access is not None:
        return data.read_by(access)
    if isinstance(data, (ArraySource, ExampleSource)):
        return data
    if _is_grain_dataset(data):
        _refuse_batches(data, what)
        return ExampleSource(data, what, is_grain=True, access=access or DEFAULT_POLICY)
    if isinstance(data, (np.ndarray, jax.Array)):
        return ArraySource(data, what)
    if hasattr(data, "__array__"):
        columns = "data.column_names" if hasattr(data, "column_names") else "data"
        raise ConfigError(
            f"{what} is a {_type_name(data)}, which is neither a numpy nor a JAX array. "
            f"Convert it: np.asarray(data), or for a table {{name: data[name].to_numpy() for name in {columns}}}."
        )
    if isinstance(data, Mapping) and jax.tree_util.all_leaves([data]):
        data = dict(data)  # a mapping that is not a pytree, such as np.load("file.npz"): each value is read once, here
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(data, datasets.Dataset) and data.format["type"] is None:
        data = data.with_format("numpy")  # otherwise rows are lists of Python numbers
    if isinstance(data, type):
        raise ConfigError(f"{what} is the class {data.__name__}. Data are an instance. Write {what}={data.__name__}().")
    if _is_sequence_of_examples(data):
        return ExampleSource(data, what, is_grain=False, access=access or DEFAULT_POLICY)
    if jax.tree_util.all_leaves([data]):
        raise ConfigError(
            f"{what} is a {_type_name(data)}. Data must be arrays (a dict or tuple of them), have __len__ and "
            "__getitem__, or be a stream, which a restart opens again. Try list(data) for a short iterator, a function "
            "(shard, num_shards, seed) under @sk.stream that returns a long one, np.load(path) for a file, "
            "jax.tree_util.register_dataclass for a dataclass of arrays."
        )
    return ArraySource(data, what)


def _type_name(data: Any) -> str:
    module = type(data).__module__
    is_local = module == "builtins" or module.startswith("spmdkit_task_")
    return type(data).__qualname__ if is_local else f"{module}.{type(data).__qualname__}"


def _is_grain_dataset(data: Any) -> bool:
    grain = sys.modules.get("grain")  # not imported here: the import takes 0.3 s, and no such dataset exists without it
    return isinstance(data, getattr(grain, "MapDataset", ()))  # without it: another thread imports grain


def _refuse_batches(dataset: Any, what: str) -> None:
    """Raises ConfigError for a grain dataset with `.batch(n)` in its chain, unless `flat_map` splits the batches."""
    nodes = [dataset]
    while nodes:
        node = nodes.pop()
        kind = type(node).__name__
        if kind == "BatchMapDataset":
            size = getattr(node, "_batch_size", "n")
            raise ConfigError(
                f"{what} is a grain dataset of batches: .batch({size}). batch_size in the config forms the batches, "
                f"and the run counts the epochs. Remove .batch({size}) and .repeat(). If {size} rows are one example, "
                "return them from __getitem__ of a class with __len__."
            )
        nodes += () if kind == "FlatMapMapDataset" else getattr(node, "_parents", ())


def _is_sequence_of_examples(data: Any) -> bool:
    if isinstance(data, (str, bytes, Mapping, tuple)):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


class ArraySource:
    """A pytree of arrays with equal first dims: row i of every leaf is example i."""

    def __init__(self, data: Any, what: str = "train_data"):
        named = _named_arrays(data, what)
        self._length = _common_length(named, what)
        self._treedef: Any = jax.tree.structure(data)
        self._where = [_leaf_label(what, name) for name, _ in named]
        self._dtypes = [device_dtype(where, leaf.dtype) for where, (_, leaf) in zip(self._where, named, strict=True)]
        mapped = [_is_memory_mapped(leaf) for _, leaf in named]
        # A mapped array is never fully read: each batch is converted.
        self._leaves = [
            np.asarray(leaf) if is_mapped else narrow(where, np.asarray(leaf), dtype)
            for (_, leaf), where, dtype, is_mapped in zip(named, self._where, self._dtypes, mapped, strict=True)
        ]
        self._narrow = any(leaf.dtype != dtype for leaf, dtype in zip(self._leaves, self._dtypes, strict=True))
        self._take = [_row_reader(leaf) for leaf in self._leaves]
        self.in_memory = not any(mapped)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray, epoch: int = 0, batch: int | None = None) -> Any:
        """Returns a copy of the rows `indices` of every leaf: 1-2 us per leaf and the copy."""
        rows = [take(indices) for take in self._take]
        if self._narrow:
            rows = [narrow(*args) for args in zip(self._where, rows, self._dtypes, strict=True)]
        return self._treedef.unflatten(rows)

    def column(self, leaf: int) -> np.ndarray:
        """Returns all rows of a leaf."""
        return self._leaves[leaf]

    def skipped(self, indices: np.ndarray, batch: int) -> None:
        """Returns None, since every row of an array can be read."""

    def element(self) -> Any:
        """Returns the shape and dtype of one example."""
        specs = [jax.ShapeDtypeStruct(x.shape[1:], d) for x, d in zip(self._leaves, self._dtypes, strict=True)]
        return self._treedef.unflatten(specs)


class NumberSource:
    """The data of a task without any: int32[rows], the number of each example in the run, from 0 on."""

    in_memory = True

    def __len__(self) -> int:
        return 2**31 - 1

    def gather(self, indices: np.ndarray, epoch: int = 0, batch: int | None = None) -> np.ndarray:
        """Returns the indices."""
        return indices.astype(np.int32)

    def skipped(self, indices: np.ndarray, batch: int) -> None:
        """Returns None."""

    def element(self) -> jax.ShapeDtypeStruct:
        """Returns an int32."""
        return jax.ShapeDtypeStruct((), np.dtype(np.int32))


def _named_arrays(data: Any, what: str) -> list[tuple[str, Any]]:
    try:
        named = named_leaves(data)
    except ValueError as error:  # dict keys that cannot be sorted
        raise ConfigError(f"{what} is not a pytree: {error}. Use keys of one type, such as strings.") from error
    if not named:
        raise ConfigError(f"{what} is {data!r}, which holds no array. Pass at least one array.")
    for name, leaf in named:
        where = _leaf_label(what, name)
        if isinstance(data, Mapping) and type(leaf).__module__.startswith("datasets"):
            raise ConfigError(
                f"{what} is a {type(data).__name__} of several data sets. Pass one of them: data[{name!r}]."
            )
        if not isinstance(leaf, (np.ndarray, jax.Array)):
            raise ConfigError(
                f"{where} is a {type(leaf).__name__}, not an array. Every leaf of a mapping or tuple must be a numpy "
                "or JAX array with the examples along its first dim. Wrap it: np.asarray(...). Pass individual "
                "examples as a list."
            )
        if isinstance(leaf, np.ma.MaskedArray):
            raise ConfigError(
                f"{where} is a numpy masked array, and JAX would drop its mask. Use .filled(value), and a leaf for "
                "the mask if needed."
            )
        if leaf.ndim == 0:
            raise ConfigError(
                f"{where} is the scalar {describe(leaf)}. The first dim of every leaf must count the examples. Put a "
                f"constant into the task, or repeat it: np.full(num_examples, value)."
            )
    return named


def _common_length(named: list[tuple[str, Any]], what: str) -> int:
    first_name, first = named[0]
    for name, leaf in named[1:]:
        if leaf.shape[0] != first.shape[0]:
            raise ConfigError(
                f"{what} has {first.shape[0]} examples in leaf '{first_name}' {describe(first)} but {leaf.shape[0]} "
                f"in leaf '{name}' {describe(leaf)}. The first dim of every leaf must count the same examples. Make "
                f"the lengths equal, for example [:{min(first.shape[0], leaf.shape[0])}]."
            )
    if first.shape[0] == 0:
        raise ConfigError(
            f"{what} is empty: {describe(first)} has 0 examples. Training and evaluation need at least 1. Check the "
            f"filter or the path that made it."
        )
    return int(first.shape[0])


def _leaf_label(what: str, name: str) -> str:
    return f"{what}: leaf '{name}'" if name else what


def _is_memory_mapped(array: Any) -> bool:
    while array is not None:
        if isinstance(array, (np.memmap, mmap.mmap)):
            return True
        array = getattr(array, "base", None)
    return False


def _row_reader(leaf: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    # take is twice as fast as indexing for a small batch, but copies all of an array that is not contiguous.
    return functools.partial(leaf.take, axis=0) if leaf.flags.c_contiguous else leaf.__getitem__


class HostBatch(NamedTuple):
    """The rows of one step on this process: a pytree of numpy arrays. `mask` is bool[rows], None if batches are always
    full; `size` the number of rows of all processes, None for the batch size."""

    examples: Any
    mask: np.ndarray | None
    size: int | None = None


def read_step(
    source: Source, schedule: Schedule, positions: np.ndarray | None, step: int
) -> tuple[Any, np.ndarray | None]:
    """Returns `(examples, mask | None)` of `step`: the rows of the global batch at `positions`.

    If batches can be short, a skipped row is padding.
    """
    indices, mask = schedule.batch(step)
    if positions is not None:
        indices, mask = indices[positions], mask[positions]
    try:
        examples = source.gather(indices, schedule.epoch(step), schedule.number(step))
    except (ConfigError, UserCodeError) as error:
        raise type(error)(f"the batch of step {step} could not be read: {error}") from error.__cause__
    if schedule.buckets:
        length, longest = schedule.length(schedule.number(step)), schedule.buckets[-1].length
        examples = jax.tree.map(lambda x: x[:, :length] if x.shape[1:2] == (longest,) else x, examples)
    if schedule.always_full:
        return examples, None
    is_skipped = source.skipped(indices, schedule.number(step))
    return examples, mask if is_skipped is None else mask & ~is_skipped
