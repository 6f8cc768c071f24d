"""The compiled programs of a comparison. A row that the mesh or the task rejects carries the reason in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdkit.config import Config, replace_keys
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.program.memory import memory_limit
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.tools.bench.traffic import Traffic, traffic_of
from spmdkit.tools.bench.variants import BASELINE, Row

OFF: Mapping[str, Any] = {"checkpoint": None, "budget": None, "profile": None}
"""Sections that a benchmark switches off."""


@dataclass(frozen=True)
class Opened:
    """A row's compiled program with what it sends, or why there is none."""

    row: Row
    program: Program | None = None
    traffic: Traffic | None = None
    refused: str = ""


class Opener:
    """Opens the rows of a config for a seed, the task loaded once.

    Args:
        config: the user's.
        devices: those of all processes.
        steps: to train.
    """

    def __init__(self, config: Config, devices: Sequence[jax.Device], steps: int):
        self._config = replace_keys(config, {**OFF, "reducer": "sum", "sync": "every_step", "steps": steps})
        self._task: Task = task_of(self._config)
        self._devices, self._steps, self._settled = devices, steps, dict[str, Any]()

    def open(self, row: Row, seed: int, reads: bool = True) -> Opened:
        """Returns a row's program, compiled, with its traffic if requested.

        Raises:
            SpmdkitError: `sum` is rejected. For any other row the reason is part of the row.
        """
        try:
            program = self._program(row, seed)
            if row == BASELINE:
                self._settle(program)
            check_fits(program, self._devices)
            return Opened(row, program, traffic_of(program, self._steps) if reads else None)
        except SpmdkitError as error:
            if row == BASELINE:
                raise
            return Opened(row, refused=" ".join(str(error).split()))

    def _program(self, row: Row, seed: int) -> Program:
        changes = {"reducer": row.reducer, "sync": row.sync, "seed": seed}
        return open_program(replace_keys(self._config, changes | self._settled), self._task, self._devices)

    def _settle(self, program: Program) -> None:
        """Has every row compute as `sum` does where the config leaves that open."""
        chosen = program.config
        self._settled = {"microbatches": chosen.microbatches, "remat": chosen.model_dump()["remat"]}


def check_fits(program: Program, devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError where a step needs more memory than a device has."""
    needed, limit = program.step_bytes, memory_limit(devices)
    if not needed.fits(limit):
        has = "less" if limit is None else format_bytes(limit)
        raise ConfigError(
            f"a step needs {format_bytes(needed.peak_bytes)} of each device, which has {has}. A step has to fit."
        )


def side_by_side(opened: Sequence[Opened], devices: Sequence[jax.Device]) -> Iterator[list[Opened]]:
    """Yields the rows that are trained in turns, `sum` first in each group: as many as fit into the memory with their
    states.

    Where not even two do, each is alone, and its time is compared with nothing.
    """
    limit = memory_limit(devices)
    first, *rest = (x for x in opened if x.program is not None)
    group = [first]
    for one in rest:
        if _fit([*group, one], limit):
            group.append(one)
            continue
        yield group
        group = [first, one] if _fit([first, one], limit) else [one]
    yield group


def _fit(together: Sequence[Opened], limit: int | None) -> bool:
    programs = [x.program for x in together if x.program is not None]
    states = sum(program.held.state_bytes for program in programs)
    return limit is None or states + max(p.step_bytes.peak_bytes - p.held.state_bytes for p in programs) <= limit
