"""`RowOrder`: the position of every row in the global batch, for all code that splits or numbers rows.

    row (s, m, i) of [shards, microbatches, rows]  is  position (m, s, i) of [microbatches, shards, rows]

Each shard of a batch holds its part of every microbatch. So splitting into microbatches sends no data, and microbatch m
is the same set of examples on every mesh and in every separately training group of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of one global batch.

    Attributes:
        shards: number of parts into which the mesh splits the batch, in order, over all groups.
        microbatches: microbatches of a step.
        rows: rows of one shard and microbatch.
    """

    shards: int
    microbatches: int
    rows: int

    @property
    def size(self) -> int:
        """Number of rows of the global batch."""
        return self.shards * self.microbatches * self.rows

    def position(self, shard: Any, micro: Any, row: Any) -> Any:
        """Returns the position of a row; int32 if its indices are traced."""
        return (micro * self.shards + shard) * self.rows + row

    def positions(self) -> np.ndarray:
        """Returns int64[size], the position of every row of the batch, in mesh order."""
        result: np.ndarray = self.position(
            *np.unravel_index(np.arange(self.size), (self.shards, self.microbatches, self.rows))
        )
        return result

    def of_shards(self, first: Any, num: int) -> jax.Array:
        """Returns int32[num * microbatches * rows], the positions of the rows of `num` shards starting at `first`."""
        indices = jnp.arange(num * self.microbatches * self.rows, dtype=jnp.int32)
        shard, micro, row = jnp.unravel_index(indices, (num, self.microbatches, self.rows))
        return jnp.asarray(self.position(first + shard, micro, row), jnp.int32)

    def of_microbatch(self, first: Any, num: int, micro: Any) -> jax.Array:
        """Returns int32[num * rows], the positions of one microbatch on `num` shards starting at `first`."""
        start = jnp.asarray(self.position(first, micro, 0), jnp.int32)
        return (start + jnp.arange(num * self.rows, dtype=jnp.int32)).astype(jnp.int32)


def split(x: jax.Array, dim: int, shards: int, num: int) -> jax.Array:
    """Returns [..., S num n, ...] as [num, ..., S n, ...]. Each of the S shards of the dim keeps its data.

    For rows: [shards * microbatches * rows, ...] as [microbatches, shards * rows, ...].
    """
    size = x.shape[dim] // num  # not -1: an array without elements has any size
    x = x.reshape(*x.shape[:dim], shards, num, size // shards, *x.shape[dim + 1 :])
    x = jnp.moveaxis(x, dim + 1, 0)
    return x.reshape(*x.shape[: dim + 1], size, *x.shape[dim + 3 :])


def join(x: jax.Array, dim: int, shards: int) -> jax.Array:
    """The inverse of `split`: [num, ..., S n, ...] -> [..., S num n, ...]."""
    size = x.shape[dim + 1]
    x = x.reshape(*x.shape[: dim + 1], shards, size // shards, *x.shape[dim + 2 :])
    x = jnp.moveaxis(x, 0, dim + 1)
    return x.reshape(*x.shape[:dim], x.shape[dim + 1] * size, *x.shape[dim + 3 :])
