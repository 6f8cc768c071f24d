"""`Sums`: the totals of one step, over one replica or over all replicas. Replicas exchange these totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spmdkit.step.metrics.aggregates import Max
from spmdkit.step.metrics.base import Metric
from spmdkit.step.metrics.mean import Mean, Means


@jax.tree_util.register_static
@dataclass(frozen=True)
class LossFacts:
    """Facts about the loss and metrics of one microbatch that are known after tracing. A pytree without leaves.

    Attributes:
        names: names of the loss and the metrics that the user's loss function returns.
        counts: for each name the (count, num) of each of its means; None for a value that is an array.
        count_has_gradient: whether a count of the loss depends on the parameters.
        divided: whether the gradient is of the loss's value: it was pulled back with 1 / count of the full batch.
    """

    names: tuple[str, ...]
    counts: tuple[tuple[tuple[Any, Any], ...], ...]
    count_has_gradient: bool = False
    divided: bool = False

    @classmethod
    def of(cls, metrics: Mapping[str, Metric]) -> LossFacts:
        """Returns the facts about these metrics. A count that depends only on shapes is a numpy number."""
        static: Callable[[Any], Any] = lambda x: x if isinstance(x, np.floating) else None
        pairs = [tuple((static(mean.count), static(mean.num)) for mean in _means(m)) for m in metrics.values()]
        return cls(tuple(metrics), tuple(pairs))

    def with_static_counts(self, metric: Any, name: str, times: int = 1) -> Any:
        """Returns the metric of `times` microbatches; counts that depend only on shapes become constants. All-reducing
        such a count costs 1.5 % of a 10 ms step (two CPU devices, jaxlib 0.10.2, 2026-11-20)."""

        def static(mean: Mean, pair: tuple[Any, Any]) -> Mean:
            known = {key: x for key, x in zip(("count", "num"), pair, strict=True) if x is not None}
            return dataclasses.replace(mean, **{key: x.dtype.type(float(x) * times) for key, x in known.items()})

        means = [static(*pair) for pair in zip(_means(metric), self.counts[self.names.index(name)], strict=True)]
        return Means(tuple(means)) if isinstance(metric, Means) else means[0] if means else metric


def _means(metric: Any) -> tuple[Mean, ...]:
    return metric.parts if isinstance(metric, Means) else (metric,) if isinstance(metric, Mean) else ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over examples. Every field adds over microbatches and replicas; metrics merge.

    Attributes:
        loss: the loss as (sum, count); None in an evaluation.
        metrics: name -> mean, sum, maximum, ...
        gradient: of `loss.sum`, or of the loss's value (`facts.divided`); a tree like the parameters. None in an
            evaluation.
        count_gradient: of `loss.count` if the count depends on the parameters, otherwise None.
        facts: static facts about the loss; None in an evaluation.
        overwritten: path of a parameter that its gradient overwrites -> the largest value.
    """

    loss: Mean | Means | None
    metrics: dict[str, Metric]
    gradient: Any = None
    count_gradient: Any = None
    facts: LossFacts | None = None
    overwritten: dict[str, Max] = field(default_factory=dict)

    def mean_gradient(self, loss: Mean | Means) -> Any:
        """Returns the gradient of `S / C`, with S and C from `loss`: `G_s / C - S / C^2 G_c`. It divides once, because
        the optimizer's fused loops would repeat a division for every element."""
        assert self.facts is not None
        if self.facts.divided or isinstance(loss, Means):
            return self.gradient
        scale = 1 / loss.divisor
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), self.gradient)
        if self.count_gradient is None:
            return grads
        ratio = loss.value * scale
        return jax.tree.map(lambda g, c: g - c * ratio.astype(c.dtype), grads, self.count_gradient)


SEAMS = {"mean_gradient": Sums.mean_gradient}
"""Functions that `verify` replaces to inject mistakes (verify/mutations.py)."""
