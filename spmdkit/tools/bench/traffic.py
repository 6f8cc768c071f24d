"""What a device sends in a step, from the bills of the compiled programs that a run calls: the figures of `plan`."""

from __future__ import annotations

from dataclasses import dataclass

from spmdkit.plan.compiled_step import read_program
from spmdkit.plan.document import over_a_run, phases
from spmdkit.program.program import Program


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends, by the formulas of `plan.bill`; None where a loop's length is unknown.

    Attributes:
        per_step: in a step of a long run, programs that run after some steps shared out over them.
        most: in the step that sends most.
        run_per_step: in a step of a run of `steps` steps, its warm-up and its start included.
    """

    per_step: float | None
    most: int | None
    run_per_step: float | None


def traffic_of(program: Program, steps: int) -> Traffic:
    """Returns what a device sends under a program. Compiles what is not compiled yet."""
    reading = read_program(program)
    of_phases = phases(program, reading)
    bills = [bill.bytes for _, bill in of_phases]
    if any(num is None for num in bills):
        return Traffic(None, None, None)
    step, *others = (num for num in bills if num is not None)
    run = 0
    for number in range(1, steps + 1):
        due = [(phase.in_place, num) for phase, num in zip(program.phases, others, strict=True) if phase.runs(number)]
        run += next((num for in_place, num in due if in_place), step) + sum(
            num for in_place, num in due if not in_place
        )
    lasting = over_a_run(program, of_phases) or {"on_average": step, "at_most": step}
    return Traffic(lasting["on_average"], lasting["at_most"], run / steps)
