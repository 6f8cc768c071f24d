"""What costs more than it needs to: one detector for each finding, a file each, found by its name.

A detector is a module with `find(step) -> iterable of Finding`. It reads the compiled program, its jaxpr and the
layout; it runs nothing. A bound on the size keeps small arrays out: a finding is something that is worth an hour of
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spmdkit.foundation import plugins
from spmdkit.plan.collectives_bill import Bill, Collective
from spmdkit.plan.finding import SEVERITIES, Finding
from spmdkit.plan.hlo.text import Module
from spmdkit.plan.memory import Memory

if TYPE_CHECKING:
    from spmdkit.plan.machine.target import Target
    from spmdkit.program.program import Program

MIN_WIRE_BYTES = 2**16
"""Bytes per step below which a collective is not worth a finding."""


@dataclass(frozen=True)
class CompiledStep:
    """What detectors look at.

    Attributes:
        target: None where the machine is not known: what depends on it is not looked for.
        scans: op_name -> length of the scans in the jaxpr (`jaxprs.scan_lengths`), for whoever walks the loops of the
            module.
    """

    program: Program
    module: Module
    bill: Bill
    memory: Memory
    target: Target | None = None
    scans: Mapping[str, int] = field(default_factory=dict)

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the step."""
        return self.program.traced.jaxpr

    def config_line(self, key: str) -> str | None:
        """Returns `configs/gpt.yaml:12`, the line of a key of the config; None where the config is not of a file."""
        place = self.program.config.where(key).rpartition(": ")[0]
        return place or None

    def matters(self, collective: Collective) -> bool:
        """Returns whether a collective is large in itself and within its program."""
        return collective.bytes_at_least >= max(MIN_WIRE_BYTES, self.bill.bytes_at_least // 50)


def find_all(step: CompiledStep) -> tuple[Finding, ...]:
    """Returns what all detectors find, most severe first, each thing once."""
    found: dict[Finding, None] = {}
    for find in plugins.load_all("findings").values():
        found |= dict.fromkeys(find(step))
    return tuple(sorted(found, key=lambda f: SEVERITIES.index(f.severity)))
