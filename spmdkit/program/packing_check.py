"""Checks that documents packed into one row do not change each other's part of the loss.

The packing of grain gives a feature `tokens` [B, T, ...] the segment ids `tokens_segment_ids` [B, T]: 1, 2, ... in each
row, 0 for padding. If the documents of a row are independent, the loss is a sum over them, and the effects of two
changes in different documents add up. So the tokens of the odd segments (a), of the even segments (b) and of both are
rolled within their segment, which retains their number and positions:

    within = loss - loss(a) - loss(b) + loss(a, b)      a and b in the same rows
    across = the same with b in other rows

`within` is zero up to rounding. Where `across` is not, the loss is no sum over rows (a balance of experts, batch
statistics), and nothing is concluded. Cost: six forward passes and one compilation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.step.step import Batch

SUFFIX = "_segment_ids"
TOLERANCE = 1e-3
"""Effect of one document on another below which they are independent, relative to its effect on itself."""

ROUNDING = 1e-6
"""Difference of losses below which they are equal, relative to the loss."""


def packed_features(batch: Batch) -> list[str]:
    """Returns the paths of the leaves that have segment ids."""
    leaves = dict(named_leaves(batch.examples))
    pairs = ((path.removesuffix(SUFFIX), ids) for path, ids in leaves.items() if path.endswith(SUFFIX))
    return [path for path, ids in pairs if path in leaves and leaves[path].shape[: ids.ndim] == ids.shape[:2]]


def check(loss_of: Callable[[Batch], Any], batch: Batch, what: str) -> None:
    """Raises ConfigError if documents of a row are not independent. `loss_of` must not donate its argument."""
    features = packed_features(batch)
    placed = jax.tree.map(lambda x: x.sharding, batch)
    roll = jax.jit(lambda batch, changed: _rolled(batch, changed, features), out_shardings=placed)

    def loss(even_rows: str, odd_rows: str = "") -> float:
        changed = [[name in rows for name in "ab"] for rows in (even_rows, odd_rows)]
        return float(np.mean(loss_of(roll(batch, np.array(changed)))))

    plain, a, b = loss(""), loss("a"), loss("b")
    within = plain - a - b + loss("ab")
    across = plain - a - loss("", "b") + loss("a", "b")
    smallest = max(TOLERANCE * max(abs(a - plain), abs(b - plain)), ROUNDING * abs(plain), 10 * abs(across))
    if abs(within) > smallest:
        ids = f"{features[0]}{SUFFIX}"
        raise ConfigError(
            f"in {what} packed documents change each other: with other tokens in one document of a row, the loss of "
            f"the others changes by {within:.3g}, and its own by {a - plain:.3g}. Documents of a row are independent. "
            f"Pass sk.attention(..., segment_ids_BT=batch[{ids!r}] - 1), where a negative id is padding. To train on "
            f"rows across documents, remove {ids} from the data."
        )


def _rolled(batch: Batch, changed: jax.Array, features: list[str]) -> Batch:
    """Returns the batch with the tokens of some segments rolled by one within their segment."""
    leaves = dict(named_leaves(batch.examples))
    for path in features:
        ids_BT = leaves[path + SUFFIX]
        is_changed_BT = changed[jnp.arange(len(ids_BT))[:, None] % 2, 1 - ids_BT % 2] & (ids_BT > 0)
        at_T = jnp.arange(ids_BT.shape[1])
        is_first_BT = jnp.diff(ids_BT, axis=1, prepend=-1) != 0
        begin_BT = jax.lax.cummax(jnp.where(is_first_BT, at_T, 0), axis=1)
        is_last_BT = jnp.roll(is_first_BT, -1, 1).at[:, -1].set(True)
        from_BT = jnp.where(is_changed_BT, jnp.where(is_last_BT, begin_BT, at_T + 1), at_T)
        rolled = jax.vmap(lambda row, source: row[source])(leaves[path], from_BT)
        leaves[path] = rolled
    examples = jax.tree.unflatten(jax.tree.structure(batch.examples), leaves.values())
    return dataclasses.replace(batch, examples=examples)
