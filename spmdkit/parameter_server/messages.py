"""What workers and servers say to each other, and the rules by which a server takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdkit.parameter_server.partition import Arrays


@dataclass(frozen=True)
class Rules:
    """How a server takes gradients.

    Attributes:
        steps: updates after which nothing is applied any more.
        aggregate: gradients whose mean is one update.
        max_staleness: a gradient that is staler is dropped; None: none is.
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
    """A gradient on its way.

    Attributes:
        worker, incarnation, number: whose it is, in which life, and which of it.
        generation, version: of the server's state when it was pulled.
        batch: the number of the batch.
        gradient: this server's leaves; None: the batch is given up, since something was not finite.
        loss, weight: the loss, and its count, by which a mean weighs the gradient.
        told: for the first server alone: metrics, `seconds` of the computation, and the `state` (old, new) of a model
            with mutable state.
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
    told: Mapping[str, Any] | None = None


class Answer(NamedTuple):
    """What became of a push: `applied`, `held` (until there are k), `late` or `stale` (dropped), `skipped`, `fenced`
    (of an earlier life), `generation` (of parameters that were lost), `again` (this batch is settled here), `done`
    (there are enough updates); and the updates that the server has applied."""

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
