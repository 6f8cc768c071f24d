"""Trains programs alternately, block by block, and times each block relative to that of `sum` in the same round.

On a shared machine only ratios of adjacent blocks are meaningful. Every second round runs in reverse order. A block is
a multiple of the period of a sync, so that syncs are as frequent in it as in a long run. Not counted: the first block
(cold caches), blocks in which a reducer warms up or groups do not train separately yet, and a shorter last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import STEPS_IN_FLIGHT
from spmdkit.program.program import Program

BLOCKS = 20
"""Number of blocks of a run, if the period of its sync permits."""


@dataclass(frozen=True)
class Block:
    """Steps trained without a pause: their number, their seconds, and whether the time counts."""

    steps: int
    seconds: float
    counts: bool

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps


@dataclass
class Trained:
    """A program in training, and its results so far.

    Attributes:
        losses: of each step, over all groups.
        blocks: in the order of rounds.
        loss: final loss: over the full evaluation set, or without one the mean of the training loss over the last tenth
            of the steps.
    """

    program: Program
    steps: int
    losses: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    loss: float = math.nan

    def __post_init__(self) -> None:
        self._state: Any = self.program.init()
        self._batches = self.program.batches(1, self.steps)
        self.block_steps = block_steps(self.program, self.steps)

    @property
    def is_done(self) -> bool:
        """Whether all steps are trained."""
        return len(self.losses) >= self.steps

    def train_block(self) -> None:
        """Trains the next block. Only the steps are timed: losses are fetched after the block."""
        first = len(self.losses) + 1
        last = min(first + self.block_steps - 1, self.steps)
        jax.block_until_ready(self._state)
        metrics, start = [], time.perf_counter()
        for _ in range(first, last + 1):
            _, batch = next(self._batches)
            self._state, output = self.program.step(self._state, batch)
            metrics.append(output)
            if len(metrics) > STEPS_IN_FLIGHT:
                jax.block_until_ready(metrics[-1 - STEPS_IN_FLIGHT])
        jax.block_until_ready(self._state)
        seconds = time.perf_counter() - start
        is_whole = last - first + 1 == self.block_steps
        counts = bool(self.blocks) and is_whole and first > first_lasting(self.program)
        self.blocks.append(Block(last - first + 1, seconds, counts))
        self.losses += [_loss(self.program.metrics(output)) for output in metrics]
        if self.is_done:
            self._end()

    def _end(self) -> None:
        if self.program.has_eval:
            values = self.program.eval(self._state)  # of the first of several sets
            self.loss = _loss({name.rpartition("/")[2]: x for name, x in reversed(values.items())})
        else:
            last = self.losses[-max(1, self.steps // 10) :]
            self.loss = math.fsum(last) / len(last)
        self._state = None
        self._batches.close()  # type: ignore[attr-defined]


def _loss(metrics: Any) -> float:
    if "loss" not in metrics:
        raise ConfigError(
            f"bench communication compares losses, and the task's metrics are {', '.join(sorted(metrics))}. Return "
            "one named loss from train_step."
        )
    return float(metrics["loss"])


def period(program: Program) -> int:
    """Returns the number of steps after which the sequence of programs that a run calls repeats."""
    return math.lcm(*(phase.every for phase in program.phases if phase.until is None))


def first_lasting(program: Program) -> int:
    """Returns the last step that differs from those of a long run: in a warm-up, or before groups train separately."""
    return max((phase.until for phase in program.phases if phase.until is not None), default=0)


def block_steps(program: Program, steps: int) -> int:
    """Returns the steps of a block: a multiple of the period, about a twentieth of the run."""
    every = period(program)
    return every * max(1, round(steps / BLOCKS / every))


def train_interleaved(trained: Sequence[Trained]) -> None:
    """Trains all programs to their end, alternating after each block."""
    number = 0
    while waiting := [x for x in trained if not x.is_done]:
        for x in waiting if number % 2 == 0 else waiting[::-1]:
            x.train_block()
        number += 1


def ratios(of: Trained, to: Trained) -> list[float]:
    """Returns the time of a step over that of `to`, for each round in which both blocks count."""
    pairs = zip(of.blocks, to.blocks, strict=False)
    return [a.step_s / b.step_s for a, b in pairs if a.counts and b.counts]
