"""`Sums`: what one replica has added up in a step, and what all of them have: the one thing that crosses between
replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from spmdkit.step.metrics.base import Metric
from spmdkit.step.metrics.mean import Mean, Means


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over examples; every part adds over microbatches and replicas, or merges where it is a metric
    (`metric.merged`, `.crossed`).

    Attributes:
        loss: the loss as (sum, count); None in an evaluation.
        metrics: by name; means, sums, maxima, counts.
        gradient: of `loss.sum`, a tree like the parameters; of a sum of means that of its value (multi_term_loss.py).
            None in an evaluation.
        count_gradient: of `loss.count`, where the count depends on the parameters; otherwise None.
    """

    loss: Mean | Means | None
    metrics: dict[str, Metric]
    gradient: Any = None
    count_gradient: Any = None

    def mean_gradient(self, loss: Mean | Means) -> Any:
        """Returns the gradient of `S / C` from those of its sum S and its count C, `G_s / C - S / C^2 G_c`; S and C are
        `loss`.

        One division here, not one per element and use: the optimizer's fused loops would each repeat it.
        """
        if isinstance(loss, Means):
            return self.gradient
        scale = 1 / loss.divisor
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), self.gradient)
        if self.count_gradient is None:
            return grads
        ratio = loss.value * scale
        return jax.tree.map(lambda g, c: g - c * ratio.astype(c.dtype), grads, self.count_gradient)


SEAMS = {"mean_gradient": Sums.mean_gradient}
"""What `verify` replaces (verify/mutations.py)."""
