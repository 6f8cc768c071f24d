"""`Sums`: what one replica has added up in a step, and what all of them have: the one thing that crosses between replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from spmdkit.means import Mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over examples; every part adds over microbatches and replicas.

    Attributes:
        loss: the loss as (sum, count); None in an evaluation.
        metrics: name -> (sum, count).
        gradient: of `loss.sum`, a tree like the parameters; None in an evaluation.
        count_gradient: of `loss.count`, where the count depends on the parameters; otherwise None.
    """

    loss: Mean | None
    metrics: dict[str, Mean]
    gradient: Any = None
    count_gradient: Any = None
