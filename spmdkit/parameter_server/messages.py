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
        steps: number of updates after which no gradient is applied.
        aggregate: number of gradients averaged into one update.
        max_staleness: gradients with a higher staleness are dropped; None: no limit.
        scale_by_staleness: divide an update by its staleness.
        ema: decay of the moving average of the parameters, or None.
    """

    steps: int
    aggregate: int = 1
    max_staleness: int | None = None
    scale_by_staleness: bool = False
    ema: float | None = None


@dataclass(frozen=True)
class Push:
    """A gradient sent to a server.

    Attributes:
        worker, incarnation, number: the identity of the push.
        generation, version: those of the pulled parameters.
        batch: the number of the batch.
        gradient: the leaves of this server; None: the batch is skipped because of a non-finite value.
        loss, weight: the loss and its count. The count is the weight of the gradient in a mean.
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


class Response(NamedTuple):
    """The outcome of a push, and the number of updates that the server has applied. Outcomes: `applied`, `pending`
    (fewer than k gradients so far), `late` or `stale` (dropped), `skipped`, `fenced` (earlier incarnation),
    `generation` (lost parameters), `again` (batch already completed), `done` (all updates are applied)."""

    outcome: str
    version: int
    staleness: int = 0


class PulledParams(NamedTuple):
    """The parameters of one server after `version` updates."""

    generation: int
    version: int
    done: bool
    params: Arrays
    model_state: Arrays | None
