"""What costs more than it needs to: one detector for each finding, a file each, found by its name.

A detector is a module with `find(step) -> iterable of Finding`. It reads the compiled program, its jaxpr and the
layout (`CompiledStep`); it runs nothing. A bound on the size keeps small arrays out: a finding is something that is
worth an hour of work.
"""

from __future__ import annotations

from dataclasses import dataclass

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that costs more than it needs to, with the line that causes it and the repair.

    Attributes:
        code: a stable name, e.g. `collective-in-accumulation-loop`.
        message: what was found, with numbers.
        source: `file.py:12`, or None where no line causes it.
        fix: the smallest change that repairs it.
        severity: `error` (the step cannot be meant this way), `warning` (it costs much), `note` (it costs little).
    """

    code: str
    message: str
    source: str | None
    fix: str
    severity: str = "warning"
