"""What a finding is: one thing that costs more than it needs to, with the line that causes it and the repair."""

from __future__ import annotations

from dataclasses import dataclass

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        severity: `error` (the step cannot be meant this way), `warning` (it costs much), `note` (it costs little).
        code: a stable name, e.g. `collective-in-accumulation-loop`.
        message: what was found, with numbers.
        source: `file.py:12`, or None where no line causes it.
        fix: the smallest change that repairs it.
    """

    severity: str
    code: str
    message: str
    source: str | None
    fix: str

    def as_json(self) -> dict[str, str | None]:
        """Returns the row of `plan --json`."""
        return {name: getattr(self, name) for name in ("severity", "code", "message", "source", "fix")}
