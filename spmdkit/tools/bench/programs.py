"""The compiled programs of a comparison, and the bytes that a device sends under each, computed as by `plan`. A row
that the mesh or the task rejects has the reason in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdkit.config import Config, replace_keys
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan.compiled_step import read_program
from spmdkit.plan.document import over_a_run, phases
from spmdkit.program.memory import memory_limit
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.tools.bench.variants import BASELINE, Row

OFF: Mapping[str, Any] = {"checkpoint": None, "budget": None, "profile": None}
"""Sections that a benchmark disables."""


Traffic = Mapping[str, float | None]


def traffic_of(program: Program, steps: int) -> Traffic:
    """Returns the bytes that one device sends, by the formulas of `plan.collectives_bill`; None if the length of a loop
    is unknown: per step of a long run (programs that run after some steps are averaged over them), in the step that
    sends most, and per step of a run of `steps` steps, including its warm-up and its start."""
    of_phases = phases(program, read_program(program))
    step, *others = (bill.bytes_at_least for _, bill in of_phases)
    if any(bill.bytes is None for _, bill in of_phases):
        return {"bytes_per_step": None, "most_bytes_in_a_step": None, "run_bytes_per_step": None}
    run = 0
    for number in range(1, steps + 1):
        due = [(phase.in_place, num) for phase, num in zip(program.phases, others, strict=True) if phase.runs(number)]
        run += next((num for in_place, num in due if in_place), step)
        run += sum(num for in_place, num in due if not in_place)
    lasting = over_a_run(program, of_phases) or {"on_average": step, "at_most": step}
    return {
        "bytes_per_step": lasting["on_average"],
        "most_bytes_in_a_step": lasting["at_most"],
        "run_bytes_per_step": run / steps,
    }


@dataclass(frozen=True)
class Opened:
    """A row's compiled program with the bytes that it sends, or why there is none."""

    row: Row
    program: Program | None = None
    traffic: Traffic | None = None
    refused: str = ""


class Opener:
    """Opens the rows of a config for a seed, on the devices of all processes. The task is loaded once."""

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
            changes = {"reducer": row.reducer, "sync": row.sync, "seed": seed, **self._settled}
            program = open_program(replace_keys(self._config, changes), self._task, self._devices)
            if row == BASELINE:  # settings that the config leaves open are those of `sum` in every row
                chosen = program.config
                self._settled = {"microbatches": chosen.microbatches, "remat": chosen.model_dump()["remat"]}
            check_fits(program, self._devices)
            return Opened(row, program, traffic_of(program, self._steps) if reads else None)
        except SpmdkitError as error:
            if row == BASELINE:
                raise
            return Opened(row, refused=" ".join(str(error).split()))


def check_fits(program: Program, devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError if a step needs more memory than a device has."""
    needed, limit = program.step_bytes, memory_limit(devices)
    if not needed.fits(limit):
        has = "less" if limit is None else format_bytes(limit)
        raise ConfigError(
            f"a step needs {format_bytes(needed.peak_bytes)} of each device, which has {has}. A step has to fit."
        )


def side_by_side(opened: Sequence[Opened], devices: Sequence[jax.Device]) -> Iterator[list[Opened]]:
    """Yields groups of rows that are trained alternately, `sum` first in each: as many as fit into memory with their
    states.

    If not even two rows fit, each is alone and its time is not compared.
    """
    limit = memory_limit(devices)
    first, *rest = (x for x in opened if x.program is not None)
    group = [first]
    for row in rest:
        if _fit([*group, row], limit):
            group.append(row)
            continue
        yield group
        group = [first, row] if _fit([first, row], limit) else [row]
    yield group


def _fit(together: Sequence[Opened], limit: int | None) -> bool:
    return fit_together([x.program for x in together if x.program is not None], limit)


def fit_together(programs: Sequence[Program], limit: int | None) -> bool:
    """Returns whether a device holds the states of all programs, and the temporaries of the largest."""
    states = sum(program.input_bytes.state_bytes for program in programs)
    return limit is None or states + max(p.step_bytes.peak_bytes - p.input_bytes.state_bytes for p in programs) <= limit
