"""Avoidable costs of a compiled step: one detector for each finding, one module each, discovered by name.

A detector is a module with `find(step) -> iterable of Finding`. It reads the compiled program, its jaxpr and the
layout (`CompiledStep`); it runs nothing. A size threshold excludes small arrays: a finding is worth an hour of work.
"""

from __future__ import annotations

from dataclasses import dataclass

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One avoidable cost, with the line that causes it and the repair.

    Attributes:
        code: a stable name, e.g. `collective-in-accumulation-loop`.
        message: the observation, with numbers.
        source: `file.py:12`, or None if no line causes it.
        fix: the smallest change that repairs it.
        severity: `error` (the step is not what the user intends), `warning` (high cost), `note` (low cost).
    """

    code: str
    message: str
    source: str | None
    fix: str
    severity: str = "warning"
