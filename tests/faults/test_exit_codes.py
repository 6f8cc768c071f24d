"""The exit codes are one table, which the errors and the guide follow."""

import re
from pathlib import Path

from spmdkit import errors
from spmdkit.errors import OUTCOMES, ExitCode, SpmdkitError, outcome

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


def test_guide_names_every_code():
    section = GUIDE.read_text().split("## Exit codes")[1].split("\n## ")[0]
    named = {int(code) for code in re.findall(r"(?:^|· )(\d+) ", section.replace("\n", " ").strip())}
    assert named == set(ExitCode) - {ExitCode.INTERRUPTED}
    assert "128+n ended by signal n" in section
    text = " ".join(section.split())
    for name, (code, words) in OUTCOMES.items():
        assert name in ("interrupted", "bug") or f"{int(code)} {words}" in text, f"{code} {words}"


def test_outcomes_and_errors_have_codes_of_the_table():
    assert {code for code, _ in OUTCOMES.values()} == set(ExitCode)
    assert outcome(79) == "checkpoint cannot be used" and outcome(137) == "ended by signal 9"
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SpmdkitError)]
    assert len(kinds) >= 9
    assert all(isinstance(kind.exit_code, ExitCode) for kind in kinds)
    assert {kind.exit_code for kind in kinds} == set(ExitCode) - {ExitCode.DONE, ExitCode.USAGE, ExitCode.INTERRUPTED}
