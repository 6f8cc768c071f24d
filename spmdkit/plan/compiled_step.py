"""The contents of a compiled step's text: the bill, the memory, the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmdkit.plan.attribution import leaves_of
from spmdkit.plan.collectives_bill import Bill, read_bill
from spmdkit.plan.finding import Finding
from spmdkit.plan.findings import CompiledStep, find_all
from spmdkit.plan.hlo.text import Module, parse
from spmdkit.plan.jaxpr_lines import scan_lengths
from spmdkit.plan.memory import Memory, read_memory

if TYPE_CHECKING:
    from spmdkit.plan.machine.target import Target
    from spmdkit.program.program import Program


@dataclass(frozen=True)
class StepAnalysis:
    """A compiled step, read.

    Attributes:
        module: the parsed text (`loops.walk(module, scans)` visits every instruction with its executions per step).
        bill: the collectives.
        memory: of one device.
        findings: most severe first.
        scans: op_name -> length of the scans in the jaxpr, for loops without a trip count in the text.
    """

    module: Module
    bill: Bill
    memory: Memory
    findings: tuple[Finding, ...]
    scans: Mapping[str, int]


def read_program(program: Program, target: Target | None = None) -> StepAnalysis:
    """Returns what the compiled step of a program costs. Compiles it where that has not been done.

    Args:
        target: the machine; without it, findings about links and about the size of the batch are not looked for.
    """
    text = program.compiled.as_text()
    assert text is not None, "this backend does not show its programs"
    module = parse(text)
    scans = scan_lengths(program.traced.jaxpr, program.traced.fun_name)
    bill = read_bill(module, program.sizes, leaves_of(program), scans)
    memory = read_memory(program, module)
    found = find_all(CompiledStep(program, module, bill, memory, target, scans))
    return StepAnalysis(module, bill, memory, found, scans)
