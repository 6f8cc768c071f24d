"""The analysis of a compiled step's text: the bill, the memory, the findings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from spmdkit.foundation import plugins
from spmdkit.plan.attribution import leaves_of
from spmdkit.plan.collectives_bill import Bill, Collective, read_bill
from spmdkit.plan.findings import SEVERITIES, Finding
from spmdkit.plan.hlo.text import Module, parse
from spmdkit.plan.jaxpr_lines import idle_share, scan_lengths
from spmdkit.plan.memory import Memory, read_memory
from spmdkit.plan.step_time import Time, predict_time

if TYPE_CHECKING:
    from spmdkit.plan.machine.target import Target
    from spmdkit.program.program import Program

MIN_WIRE_BYTES = 2**16
"""Minimum bytes per step of a collective that is worth a finding."""


@dataclass(frozen=True)
class CompiledStep:
    """A parsed compiled step, the input of the detectors.

    Attributes:
        module: the parsed text (`loops.walk(module, scans)` visits every instruction with its executions per step).
        bill: the collectives.
        target: the machine; None if unknown: checks that depend on it are skipped.
        scans: op_name -> length of the scans in the jaxpr, for loops without a trip count in the HLO text.
        call_s: host time of one call of the step.
    """

    program: Program
    module: Module
    bill: Bill
    target: Target | None = None
    scans: Mapping[str, int] = field(default_factory=dict)
    call_s: float = 0.0

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory of one device."""
        return read_memory(self.program, self.module)

    @functools.cached_property
    def time(self) -> Time | None:
        """The predicted time of one step; None without a target."""
        if self.target is None:
            return None
        program, devices = self.program, list(self.program.mesh.devices.flat)
        idle = idle_share(self.jaxpr, program.traced.fun_name, program.sizes.get("pipeline", 1))
        return predict_time(
            self.target,
            self.module,
            self.bill,
            devices,
            scans=self.scans,
            host_bytes=self.memory.host_bytes,
            call_s=self.call_s,
            idle=idle,
        )

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all detectors, most severe first, without duplicates."""
        results = dict.fromkeys(finding for find in plugins.load_all("findings").values() for finding in find(self))
        return tuple(sorted(results, key=lambda f: SEVERITIES.index(f.severity)))

    @property
    def is_substitute(self) -> bool:
        """Whether the step is compiled for CPU devices in place of GPUs. That compiler sends bfloat16 as float32,
        merges fewer collectives, and attributes products to other lines: a detector omits what it can cause."""
        return self.target is not None and self.target.chip.kind == "gpu" and self.target.compiler == "cpu"

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the step."""
        return self.program.traced.jaxpr

    def config_line(self, key: str) -> str | None:
        """Returns the line of a config key, `configs/gpt.yaml:12`; None if the config was not read from a file."""
        return self.program.config.where(key).rpartition(": ")[0] or None

    def is_significant(self, collective: Collective) -> bool:
        """Returns whether a collective is large in absolute terms and relative to its program."""
        return collective.bytes_at_least >= max(MIN_WIRE_BYTES, self.bill.bytes_at_least // 50)


def read_program(program: Program, target: Target | None = None, call_s: float = 0.0) -> CompiledStep:
    """Returns the analysis of the compiled step of a program. Compiles the step if necessary.

    Args:
        target: the machine; without it, checks of links and of the batch size are skipped.
        call_s: host time of one call of the step.
    """
    scans = scan_lengths(program.traced.jaxpr, program.traced.fun_name)
    return read_compiled(program, program.compiled, scans, target, call_s)


def read_compiled(
    program: Program,
    compiled: jax.stages.Compiled,
    scans: Mapping[str, int],
    target: Target | None = None,
    call_s: float = 0.0,
) -> CompiledStep:
    """Returns the analysis of one of the compiled programs that a run calls."""
    text = compiled.as_text()
    assert text is not None, "this backend does not show its programs"
    module = parse(text)
    return CompiledStep(
        program, module, read_bill(module, program.sizes, leaves_of(program), scans), target, scans, call_s
    )
