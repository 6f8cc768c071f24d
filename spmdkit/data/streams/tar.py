"""`sk.tar`: tar files of samples, as WebDataset writes them. A position is (file, offset of a member): exact.

Consecutive members with one key are a sample: `a/7.image.npy` has the key `a/7` and the field `image.npy`.
"""

from __future__ import annotations

import glob
import io
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from spmdkit.data.streams.base import State
from spmdkit.errors import ConfigError, UserCodeError

Sample = dict[str, Any]
"""`__key__`, and the bytes of each field."""

KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class TarStream:
    """A stream over the samples of tar files."""

    def __init__(self, paths: list[str], decode: Callable[[Sample], Any], shuffle: bool):
        self._paths, self._decode, self._shuffle = paths, decode, shuffle

    def most_shards(self) -> int:
        """Returns the number of files."""
        return len(self._paths)

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> TarShard:
        """Returns every `num_shards`-th file from `shard` on, in the order of this epoch."""
        order = np.arange(len(self._paths))
        if self._shuffle:
            order = np.random.default_rng((seed, epoch)).permutation(order)
        return TarShard([self._paths[i] for i in order[shard::num_shards]], self._decode, state or (0, 0))


class TarShard:
    """Some tar files. Its state is (the number of the file, the offset of the first member of the next sample)."""

    def __init__(self, paths: list[str], decode: Callable[[Sample], Any], state: tuple[int, int]):
        self._paths, self._decode, (self._number, self._offset) = paths, decode, state
        self._file: IO[bytes] | None = None
        self._tar: Any = None  # a TarFile
        self._next: tarfile.TarInfo | None = None

    def __next__(self) -> Any:
        while self._number < len(self._paths):
            path = self._paths[self._number]
            try:
                sample = self._sample(path)
            except (OSError, EOFError, tarfile.TarError) as error:
                self.close()
                raise UserCodeError(
                    f"sk.tar: {path} cannot be read at byte {self._offset} ({error}). A file is a whole tar without "
                    "compression. Write it again."
                ) from error
            if sample:
                return self._decode(sample)
        raise StopIteration

    def _sample(self, path: str) -> Sample:
        """Returns the next sample of the file; empty at its end."""
        if self._file is None:
            self._file = open(path, "rb")  # noqa: SIM115  closed by `close`
            self._file.seek(self._offset)
            self._tar = tarfile.TarFile(fileobj=self._file)
        sample: Sample = {}
        while (member := self._next or self._tar.next()) is not None:
            self._next, match = None, KEY.fullmatch(member.name)
            self._tar.members.clear()  # otherwise a list of all members that were read
            if match is None or not member.isfile():
                continue
            key, field = match[1], match[2].lower()
            if sample.setdefault("__key__", key) != key:
                self._next, self._offset = member, member.offset
                return sample
            if field in sample:
                raise tarfile.TarError(f"sample {key} has two members {field}")
            self._file.seek(member.offset_data)
            sample[field] = self._file.read(member.size)
            if len(sample[field]) < member.size:
                raise tarfile.ReadError("unexpected end of data")
        self.close()
        self._number, self._offset = self._number + 1, 0
        return sample

    def state(self) -> State:
        """Returns (file, offset)."""
        return self._number, self._offset

    def close(self) -> None:
        """Closes the open file."""
        if self._file is not None:
            self._file.close()
        self._file = self._tar = self._next = None


def tar(
    files: str | Path | Sequence[str | Path], decode: Callable[[Sample], Any] | None = None, *, shuffle: bool = True
) -> Any:
    """Returns tar files of samples, as WebDataset writes them, as a stream for `Task(train_data=)`.

    Consecutive members with the same name up to the first dot are a sample: `{"__key__": name, "jpg": bytes, ...}`.

    Args:
        files: a pattern such as "train-{000000..000099}.tar" or "data/*.tar", or file names.
        decode: returns the example of a sample; None: `.npy` arrays and the integers of `.cls` files.
        shuffle: draws the order of the files from the seed and the epoch. Samples of a file are read in their order.

    Raises:
        ConfigError: no file matches, or a file of a range is missing.
    """
    patterns = [files] if isinstance(files, (str, Path)) else files
    paths = list[str]()
    for pattern in (name for each in patterns for name in _expanded(str(each))):
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise ConfigError(f"sk.tar: no file matches {pattern}. Relative paths start at {Path.cwd()}. Correct it.")
        paths += found
    return TarStream(paths, decode or decode_arrays, shuffle)


def _expanded(pattern: str) -> list[str]:
    """Returns the names of a range {first..last} of numbers with leading zeros."""
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    numbers = range(int(match[1]), int(match[2]) + 1)
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [name for i in numbers for name in _expanded(f"{before}{i:0{len(match[1])}}{after}")]


def decode_arrays(sample: Sample) -> dict[str, np.ndarray]:
    """Returns the arrays and integers of a sample by field."""
    example = dict[str, np.ndarray]()
    for field, content in sample.items():
        kind = field.rpartition(".")[2]
        if kind == "npy":
            example[field] = np.load(io.BytesIO(content), allow_pickle=False)
        elif kind == "cls":
            example[field] = np.asarray(int(content), np.int32)
        elif field != "__key__":
            raise ConfigError(
                f"sk.tar: sample {sample['__key__']} has a field {field}, which only your code can decode. Pass "
                "decode=, a function from the fields of a sample, as bytes, to a dict of arrays."
            )
    return example


def open_stream(data: Any) -> TarStream | None:
    """Returns a stream of `tar` as it is."""
    return data if isinstance(data, TarStream) else None
