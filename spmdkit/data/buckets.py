"""Buckets of lengths: a batch has examples of one bucket, shortened to its length, and each bucket has a program.

An example is stored with the length of the last boundary. The bucket of a step is drawn from the seed and the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from spmdkit.data.schedule import Bucket
from spmdkit.data.source import ArraySource, Source
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import describe, named_leaves

READ_TOGETHER = 1024
"""Examples of which the lengths are read at a time."""


def buckets_of(source: Source, leaf: str, boundaries: Sequence[int], what: str) -> tuple[Bucket, ...]:
    """Returns the buckets of data; the length of an example is in its leaf `leaf`.

    Raises:
        ConfigError: there is no such leaf, an example is longer than the last boundary, or no leaf is that long.
    """
    named, longest = named_leaves(source.element()), boundaries[-1]
    found = [(i, x) for i, (name, x) in enumerate(named) if name == leaf]
    if not found or found[0][1].shape or not np.issubdtype(found[0][1].dtype, np.integer):
        known = [name for name, _ in named]
        has = f"is {describe(found[0][1])}" if found else "is no leaf"
        raise ConfigError(
            f"data.bucket_by: '{leaf}' of {what} {has}. It is the length of each example, an integer."
            f"{nearest(leaf, known)} Leaves: {', '.join(known)}."
        )
    if not shortened_leaves(source, longest):
        raise ConfigError(
            f"data.bucket_boundaries: no leaf of an example of {what} has {longest} as its first dim. Examples are "
            "stored with the length of the last boundary, and a batch is shortened to its bucket. Pad them to it."
        )
    lengths = _column(source, found[0][0])
    if (most := lengths.max()) > longest:
        raise ConfigError(
            f"data.bucket_boundaries: {(lengths > longest).sum()} examples of {what} are longer than the last "
            f"boundary, {longest}; the longest has {most}. Add a boundary, or drop them."
        )
    bucket = np.searchsorted(np.asarray(boundaries), lengths)
    return tuple(Bucket(length, np.flatnonzero(bucket == i)) for i, length in enumerate(boundaries))


def shortened_leaves(source: Source, longest: int) -> list[str]:
    """Returns the leaves that are shortened to the length of a bucket: the first dim of an example is `longest`."""
    return [name for name, x in named_leaves(source.element()) if x.shape[:1] == (longest,)]


def _column(source: Source, leaf: int) -> np.ndarray:
    if isinstance(source, ArraySource):
        return source.column(leaf)
    parts = np.array_split(np.arange(len(source)), -(-len(source) // READ_TOGETHER))
    return np.concatenate([jax.tree.leaves(source.gather(part))[leaf] for part in parts])
