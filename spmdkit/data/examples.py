"""Data that returns one example at a time: a user's random-access object, a list, or a `grain.MapDataset`.

Every example must have the structure, shapes and dtypes of example 0, because a compiled step has fixed shapes.
`data[i]` must depend on i alone. Training and evaluation together call it from one thread at a time, or with
`data.threads` above 1 from several threads. An object with `__getitems__(indices) -> examples`, such as a dataset of
Hugging Face or torch, is read by one call per batch.

A grain dataset is indexed with `epoch * len + i`, as in grain: its `random_map` draws new values in each epoch, and a
resumed run draws the same values.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmdkit.data.example_form import ExampleForm, write_row
from spmdkit.data.row_errors import DEFAULT_POLICY, ReadPolicy
from spmdkit.errors import ConfigError, SpmdkitError, UserCodeError

ENDLESS = 2**53
"""A greater length is no number of examples: grain's `repeat()` has sys.maxsize, and floats are exact up to here."""


class ExampleSource:
    """A `Source` that reads examples one by one with `data[i]` and stacks them."""

    in_memory = False

    def __init__(
        self, data: Any, what: str = "train_data", is_grain: bool = False, access: ReadPolicy = DEFAULT_POLICY
    ):
        self._data = data
        self._what = what
        self._access = access
        self._length = _length(data, what)
        self._epoch_stride = self._length if is_grain else 0
        self._read_all: Callable[[list[int]], Sequence[Any]] | None = getattr(data, "__getitems__", None)
        self._form = ExampleForm(f"{what}[{{}}]", 0, self._read(0, 0, lambda example: example))

    def read_by(self, access: ReadPolicy) -> ExampleSource:
        """Returns this source with a different read policy."""
        other = copy.copy(self)
        other._access = access
        return other

    def __len__(self) -> int:
        return self._length

    def element(self) -> Any:
        """Returns the shapes and dtypes of example 0, which all examples must have."""
        return self._form.element()

    def gather(self, indices: np.ndarray, epoch: int = 0, batch: int | None = None) -> Any:
        """Returns the examples `indices`, stacked. A repeated index is read once.

        Each example is copied before the next is read, since the user's data may return views of one buffer.

        Args:
            batch: the number of the batch, to look up its skipped rows.

        Raises:
          UserCodeError: the user's `data[i]` raised; its exception is the cause.
          ConfigError: the structure, shapes or dtypes of an example differ from example 0.
        """
        rows = self._form.empty(len(indices))
        if self._reads_together() and self._read_together(rows, indices.tolist(), epoch):
            return self._form.tree(rows)
        previous = -1
        for row, index in enumerate(indices.tolist()):
            if index == previous:
                write_row(rows, row, [out[row - 1] for out in rows])
            else:
                self._read_into(rows, row, index, epoch, batch)
            previous = index
        return self._form.tree(rows)

    def _reads_together(self) -> bool:
        ledger, is_grain = self._access.skipped_rows, self._epoch_stride > 0
        can_skip = ledger is not None and ledger.limit > 0
        return not can_skip and (self._read_all is not None or (is_grain and not self._access.retries))

    def _read_together(self, rows: list[np.ndarray], indices: list[int], epoch: int) -> bool:
        """Reads a batch in one call. Returns False if that raised: single reads then name the row."""

        def read() -> None:
            of_epoch = (self._data[epoch * self._epoch_stride + index] for index in indices)
            examples = of_epoch if self._read_all is None else self._read_all(indices)
            for row, (index, example) in enumerate(zip(indices, examples, strict=True)):
                self._form.write(index, example, rows, row)

        with contextlib.suppress(Exception, SystemExit, GeneratorExit):
            self._access.read(indices[0], read)
            return True
        return False

    def skipped(self, indices: np.ndarray, batch: int) -> np.ndarray | None:
        """Returns bool[len(indices)], True for rows that `gather` has replaced, or None if no row may be skipped."""
        ledger = self._access.skipped_rows
        if ledger is None or not ledger.limit:
            return None
        return np.array([ledger.has(batch, index) for index in indices.tolist()], bool)

    def _read_into(self, rows: list[np.ndarray], row: int, index: int, epoch: int, batch: int | None) -> None:
        """Writes example `index`, or the next readable one if rows may be skipped, into `rows` at `row`."""

        def read(index: int) -> None:
            self._read(index, epoch, lambda example: self._form.write(index, example, rows, row))

        ledger = self._access.skipped_rows
        if ledger is None or not ledger.limit or batch is None:
            return read(index)
        while True:
            if not ledger.has(batch, index):
                try:
                    return read(index)
                except (ConfigError, UserCodeError) as error:
                    exits = isinstance(error.__cause__, SystemExit | GeneratorExit)
                    if exits or not ledger.skip(batch, index, error.__cause__ or error):
                        raise
            index = (index + 1) % self._length

    def _read(self, index: int, epoch: int, take: Callable[[Any], Any]) -> Any:
        """Reads an example and returns `take(example)`. No other example is read before `take` returns."""

        def read() -> Any:
            example = self._data[epoch * self._epoch_stride + index]
            if example is None:
                raise ConfigError(
                    f"{self._what}[{index}] is None, not an example. grain's filter leaves such gaps, and a batch of "
                    "a fixed size cannot have them. Filter beforehand: compute the indices to use, and pass them to "
                    "MapDataset.source(indices)."
                )
            return take(example)

        try:
            return self._access.read(index, read)
        except SpmdkitError:
            raise
        except (SystemExit, GeneratorExit) as error:
            raise UserCodeError(_exit_message(f"{self._what}[{index}]", error)) from error
        except Exception as error:
            raise UserCodeError(
                f"{self._what}[{index}] raised {type(error).__name__}: {error}. Every index from 0 to "
                f"{self._length - 1} must return an example, because len() is {self._length}. Fix the data's "
                "__getitem__ or its __len__."
            ) from error


def _exit_message(what: str, error: BaseException) -> str:
    """Returns the message about data that raise an exit of the process."""
    exception = f"SystemExit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
    return (
        f"{what} raised {exception}. A run ends when its steps are done, and data cannot end it: exit code 0 would "
        "mean that it has trained to its last step. Return the example, or raise an error that describes the "
        "problem."
    )


def _length(data: Any, what: str) -> int:
    try:
        length = len(data)
    except (SystemExit, GeneratorExit) as error:
        raise UserCodeError(_exit_message(f"len({what})", error)) from error
    except Exception as error:
        raise UserCodeError(
            f"len({what}) raised {type(error).__name__}: {error}. Data must know its number of examples before the "
            f"first step. Fix its __len__."
        ) from error
    if length == 0:
        raise ConfigError(
            f"{what} is empty: len() is 0. Training and evaluation need at least 1 example. Check the filter or the "
            f"path that made it."
        )
    if length > ENDLESS:
        raise ConfigError(
            f"{what} is endless: len() is {length}, more than 2**53. The run counts the epochs. Remove .repeat(), or "
            "return the number of distinct examples from __len__."
        )
    return int(length)
