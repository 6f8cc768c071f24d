"""The messages between workers and servers, and the rules by which a server applies a push."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdkit.parameter_server.partition import Arrays


@dataclass(frozen=True)
class Rules:
    """How a server applies gradients.

    Attributes:
        steps: updates after which nothing is applied.
        aggregate: gradients that are averaged into one update.
        max_staleness: staler gradients are dropped; None: none.
        scale_by_staleness: divide an update by its staleness.
        ema: decay of the average of parameters, or None.
    """

    steps: int
    aggregate: int = 1
    max_staleness: int | None = None
    scale_by_staleness: bool = False
    ema: float | None = None


@dataclass(frozen=True)
class Push:
    """A gradient for a server.

    Attributes:
        worker, incarnation, number: the sender, its incarnation, and the number of the push.
        generation, version: of the server's state when it was pulled.
        batch: the number of the batch.
        gradient: this server's leaves; None: the batch is skipped, since a value was not finite.
        loss, weight: the loss, and its count, the weight of the gradient in a mean.
        report: for the first server only: metrics, and the `state` (old, new) of a model with mutable state.
    """

    worker: int
    incarnation: int
    number: int
    generation: int
    version: int
    batch: int
    gradient: Arrays | None
    loss: float = 0.0
    weight: float = 1.0
    report: Mapping[str, Any] | None = None


class Answer(NamedTuple):
    """The outcome of a push: `applied`, `held` (until there are k), `late` or `stale` (dropped), `skipped`, `fenced`
    (of an earlier incarnation), `generation` (of lost parameters), `again` (this batch is complete here), `done` (there
    are enough updates); and the number of updates that the server has applied."""

    outcome: str
    version: int
    staleness: int = 0


class Pulled(NamedTuple):
    """The parameters of one server after `version` updates."""

    generation: int
    version: int
    done: bool
    params: Arrays
    model_state: Arrays | None
