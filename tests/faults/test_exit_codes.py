"""The exit codes are one table, which the errors and the reference follow."""

from spmdkit import errors
from spmdkit.errors import OUTCOMES, ExitCode, SpmdkitError, outcome


def test_outcomes_and_errors_have_codes_of_the_table():
    assert {code for code, _ in OUTCOMES.values()} == set(ExitCode)
    assert outcome(79) == "checkpoint cannot be used" and outcome(137) == "ended by signal 9"
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SpmdkitError)]
    assert len(kinds) >= 9
    assert all(isinstance(kind.exit_code, ExitCode) for kind in kinds)
    assert {kind.exit_code for kind in kinds} == set(ExitCode) - {ExitCode.DONE, ExitCode.USAGE, ExitCode.INTERRUPTED}
