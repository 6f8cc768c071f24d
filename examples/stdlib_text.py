"""Text that every machine has: the source files of Python's standard library, as bytes to train and evaluate on."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

VOCAB = 256
NOT_TRAINED_ON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders that differ between installations, or that hold tables instead of code."""


def read_files(train_bytes: int, eval_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the files to train on and the files to evaluate on, each truncated to its number of bytes.

    The order and the split follow from a hash of each file's path: they do not depend on the order of the file system,
    and both sides contain all parts of the library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(library) for path in library.rglob("*.py")]
    names = [name for name in names if not NOT_TRAINED_ON.intersection(name.parts)]
    hashes = {name: hashlib.sha256(name.as_posix().encode()).digest() for name in names}
    names.sort(key=hashes.__getitem__)
    eval_names = [name for name in names if hashes[name][-1] < 26]  # a tenth of them
    train_names = [name for name in names if hashes[name][-1] >= 26]
    return _read(library, train_names, train_bytes), _read(library, eval_names, eval_bytes)


def _read(library: Path, names: Iterable[Path], max_bytes: int) -> list[bytes]:
    files: list[bytes] = []
    for name in names:
        left = max_bytes - sum(map(len, files))
        if left <= 1:
            break
        files.append((library / name).read_bytes()[:left])
    return files


def windows(files: list[bytes], context: int, document_masks: bool) -> dict[str, np.ndarray]:
    """Returns the examples: `tokens` uint8[examples, context + 1] and `num_targets` int32[examples].

    The first `num_targets` of the bytes `tokens[1:]` are targets, the others are padding. Windows overlap by one byte:
    the
    last target of one is the first input of the next.
    """
    if not document_masks:
        text = np.frombuffer(b"".join(files), np.uint8)
        tokens = np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]  # a view: no byte is copied
        return {"tokens": tokens, "num_targets": np.full(len(tokens), context, np.int32)}
    pieces = [file[i : i + context + 1] for file in files for i in range(0, len(file) - 1, context)]
    tokens = np.frombuffer(b"".join(piece.ljust(context + 1, b"\0") for piece in pieces), np.uint8)
    num_targets = np.array([len(piece) - 1 for piece in pieces], np.int32)
    return {"tokens": tokens.reshape(-1, context + 1), "num_targets": num_targets}


class RandomTokens:
    """Examples like those of `windows`, drawn from their index alone: int32 tokens of the vocabulary, no padding."""

    def __init__(self, context: int, vocab: int):
        self.context, self.vocab = context, vocab

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(index).integers(self.vocab, size=self.context + 1, dtype=np.int32)
        return {"tokens": tokens, "num_targets": np.int32(self.context)}


def unigram_loss(train_files: list[bytes], eval_files: list[bytes]) -> float:
    """Returns the loss, in nats per byte, of predicting each evaluation byte by its frequency in training.

    A model without context cannot do better; counts start at one, so that no byte is impossible.
    """
    counts = 1 + np.bincount(np.frombuffer(b"".join(train_files), np.uint8), minlength=VOCAB)
    log_probs = np.log(counts / counts.sum())
    return float(-log_probs[np.frombuffer(b"".join(eval_files), np.uint8)].mean())
