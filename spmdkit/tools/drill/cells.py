"""The cells of the matrix of faults: every kind of fault, in every phase of a run, with 1, 2 and 4 processes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from spmdkit.config import Config
from spmdkit.faults.injection.fault import CHECKPOINT_FAULTS, IN_A_STEP, NETWORK, Fault
from spmdkit.tools.drill import clock, network, object_store

PROCESSES = (1, 2, 4)
START, RESTORE, FIRST, STEADY, SAVE, EVALUATION, END = PHASES = (
    "start",
    "restore",
    "first-step",
    "steady-state",
    "save",
    "evaluation",
    "end",
)
HANGS = {
    "hang-import": (START,),
    "hang-restore": (RESTORE,),
    "hang-data": (FIRST, STEADY),
    "hang-step": (FIRST, STEADY),
    "hang-hook": (FIRST, STEADY),
    "hang-save": (SAVE,),
    "hang-evaluation": (EVALUATION,),
    "hang-end": (END,),
}
"""Kind -> the phases in which the run is in that activity."""
KINDS = ("kill", "term", "stop", *HANGS, *IN_A_STEP, *CHECKPOINT_FAULTS, "disk-full", *NETWORK, "service")
KINDS = (*KINDS, "object-store", "clock", "memory")
ENTERED = {START: "import", RESTORE: "restore", SAVE: "save", EVALUATION: "evaluation", END: "end"}
"""Phase of the matrix -> the phase of the process that begins with the fault."""
STEADY_STEPS = 4
"""Steps after the restored one at which a run is in its steady state."""


@dataclass(frozen=True)
class Cell:
    """One cell; `process`: where the fault is injected."""

    kind: str
    phase: str
    num_processes: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.phase}/{self.num_processes}"

    @property
    def process(self) -> int:
        """The first and the last process in turn."""
        return 0 if PHASES.index(self.phase) % 2 else self.num_processes - 1

    def fault(self, restored: int) -> Fault:
        """Returns the fault for a run that resumes from step `restored`."""
        step = restored + (1 if self.phase == FIRST else STEADY_STEPS)
        if self.kind in HANGS:
            from_step = step if self.phase in (FIRST, STEADY) else 0
            return Fault("hang", self.process, phase=self.kind.removeprefix("hang-"), from_step=from_step)
        if self.phase in (FIRST, STEADY):
            return Fault(self.kind, self.process, step)
        return Fault(self.kind, self.process, phase=ENTERED[self.phase])


def all_cells(patterns: Sequence[str] = ()) -> list[Cell]:
    """Returns the cells with a name that matches a pattern (`kill@*/2`); all without a pattern."""
    cells = [Cell(*parts) for parts in itertools.product(KINDS, PHASES, PROCESSES)]
    return [cell for cell in cells if not patterns or any(fnmatchcase(str(cell), each) for each in patterns)]


def not_applicable(cell: Cell, config: Config) -> str:
    """Returns why a cell cannot exist, or an empty text."""
    kind, phase, alone = cell.kind, cell.phase, cell.num_processes == 1
    if kind in HANGS and phase not in HANGS[kind]:
        return "the run is in another activity in this phase"
    if kind in IN_A_STEP and phase not in (FIRST, STEADY):
        return "this fault changes a step"
    if alone and kind in ("stop", "service", *NETWORK):
        reasons = {"stop": "a single process that is stopped continues with SIGCONT", "service": "one process has none"}
        return reasons.get(kind, "one process has no peer")
    reasons = {
        "hang-hook": "" if config.hooks else "the config has no hooks",
        "bit-flip": "" if config.replica_check is not None else "replica_check is null",
        "clock": clock.missing_compiler(),
        "object-store": object_store.missing_packages(),
        **dict.fromkeys(NETWORK, network.missing_support()),
    }
    if phase == EVALUATION and config.eval.every_steps is None:
        return "eval.every_steps is null"
    return reasons.get(kind, "")
