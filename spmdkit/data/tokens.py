"""`sk.tokens`: a memory-mapped file of tokens as an indexed source of windows, with document boundaries.

flat file (nanoGPT)     the tokens of all documents; documents may end with a token `end`
Megatron                the same, and a file `.idx` next to it:
    "MMIDIDX\\0\\0", u64 version, u8 dtype code, u64 sequences, u64 documents + 1,
    i32 sizes[sequences], i64 pointers[sequences] (bytes), i64 first sequence of each document, and the end
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spmdkit.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's codes of the dtypes of tokens."""


class Tokens:
    """Windows of `context` tokens, and the tokens that follow them. Windows do not overlap; a rest is dropped."""

    def __init__(self, tokens: np.ndarray, context: int, end: int | None, starts: np.ndarray | None):
        self._tokens, self._context, self._end, self._starts = tokens, context, end, starts

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Returns the windows `indices`, read together."""
        context = self._context
        places = np.asarray(indices)[:, None] * context + np.arange(context + 1)
        windows = self._tokens[places].astype(np.int32)
        leaves = {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
        if (first := self._is_first(places, windows)) is not None:
            at = np.arange(context)
            begin = np.maximum.accumulate(np.where(first[:, :-1], at, 0), axis=1)
            segments = np.cumsum(first[:, :-1], axis=1, dtype=np.int32)
            leaves |= {
                "segment_ids": segments - segments[:, :1],
                "positions": (at - begin).astype(np.int32),
                "target_mask": ~first[:, 1:],
            }
        return [{name: leaf[row] for name, leaf in leaves.items()} for row in range(len(windows))]

    def _is_first(self, places: np.ndarray, windows: np.ndarray) -> np.ndarray | None:
        """Returns which tokens of the windows are the first of a document; None: no boundaries."""
        if self._starts is not None:
            at = np.searchsorted(self._starts, places)
            first: np.ndarray = self._starts[np.minimum(at, len(self._starts) - 1)] == places
            return first
        if self._end is None:
            return None
        return np.concatenate([np.zeros((len(windows), 1), bool), windows[:, :-1] == self._end], axis=1)


def tokens(file: str | Path, context: int, dtype: str | None = None, end: int | None = None) -> Tokens:
    """Returns a file of tokens as data for `Task(train_data=)`.

    An example has `inputs` and `targets`, int32[context]. If the boundaries of documents are known, it also has
    `segment_ids` and `positions` (int32[context], from 0 in each document and window) and `target_mask` (bool[context],
    False where the target belongs to the next document).

    Args:
        file: a flat file of integers. A file of the same name with the suffix `.idx` has Megatron's dtype and
            boundaries of documents.
        context: the number of tokens of an example.
        dtype: of a file without `.idx`, such as "uint16".
        end: the token that ends each document of a file without `.idx`.

    Raises:
        ConfigError: the file is missing, shorter than one window, or does not match its `.idx`.
    """
    path, starts = Path(file), None
    if not path.is_file():
        raise ConfigError(f"sk.tokens: {path} is not a file. Write the tokens with array.tofile, or correct the path.")
    if context < 1:
        raise ConfigError(f"sk.tokens: context is {context}. An example has at least 1 token. Pass context=1024.")
    index = path.with_suffix(".idx")
    if index.is_file():
        if dtype is not None or end is not None:
            raise ConfigError(f"sk.tokens: {index} has the dtype and the documents of {path}. Remove dtype= and end=.")
        dtype, starts = _read_index(index, path)
    elif dtype is None:
        raise ConfigError(f'sk.tokens: {path} has no {index.name}, so its dtype is unknown. Pass dtype="uint16".')
    if path.stat().st_size % np.dtype(dtype).itemsize or path.stat().st_size // np.dtype(dtype).itemsize <= context:
        raise ConfigError(
            f"sk.tokens: {path} has {path.stat().st_size} bytes. It must be whole tokens of {dtype}, and more than "
            f"context={context} of them. Correct dtype, or lower context."
        )
    return Tokens(np.memmap(path, dtype, "r"), context, end, starts)


def _read_index(index: Path, path: Path) -> tuple[str, np.ndarray]:
    """Returns (dtype, the first token of each document)."""
    data = index.read_bytes()
    magic, version, code, sequences, documents = HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))
    size = HEADER.size + 12 * sequences + 8 * documents
    if magic != MAGIC or version != 1 or code not in DTYPES or len(data) != size:
        raise ConfigError(
            f"sk.tokens: {index} is not an index of Megatron of version 1 with integer tokens. Write it with "
            "Megatron's preprocess_data.py, or remove it and pass dtype= and end=."
        )
    sizes = np.frombuffer(data, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, HEADER.size + 4 * sequences)
    first = np.frombuffer(data, "<i8", documents, HEADER.size + 12 * sequences)
    begin = np.concatenate([[0], np.cumsum(sizes)])
    width = np.dtype(DTYPES[code]).itemsize
    if not np.array_equal(pointers, begin[:-1] * width) or path.stat().st_size != begin[-1] * width:
        raise ConfigError(
            f"sk.tokens: {path} has {path.stat().st_size} bytes, and {index.name} describes {begin[-1] * width} bytes "
            "of sequences in order. Both files must come from one call of preprocess_data.py. Write them again."
        )
    return DTYPES[code], np.unique(begin[first])
