"""Mistakes of users and of the toolkit in five natural tasks: `verify` sees each, and says a line that is right, or none."""

import pytest

from tests.support import located

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

QUICK = ["cnn median_of_a_shard", "recurrent key_forgotten", "contrastive gradient_by_rows"]


@pytest.mark.parametrize("case", QUICK)
def test_the_line_that_is_wrong_is_told(case):
    assert located.told(*case.split()).verdict == "right"


@pytest.mark.slow
@pytest.mark.parametrize("task", located.TASKS)
def test_four_in_five_kinds_are_told_with_their_line_and_none_with_another(task):
    said = {name: located.told(task, name) for name in (*located.USERS, *located.TOOLKITS)}
    verdicts = [found.verdict for found in said.values()]
    assert len(said) >= 20 and set(verdicts) <= {"right", "silent"}, said
    assert verdicts.count("right") >= 0.8 * len(verdicts), said


@pytest.mark.parametrize("task", located.TASKS)
@pytest.mark.parametrize("name", located.USERS)
def test_a_mistake_is_one_statement_of_a_users_code(task, name):
    """The text with the mistake is the task's own but for the line, and is Python."""
    text, wrong = located.changed(located.text_of(task), located.USERS[name])
    compile(text, task, "exec")
    kept = [line for i, line in enumerate(text.splitlines(), 1) if i not in wrong]
    assert len(wrong) <= 2 and set(kept) < set(located.text_of(task).splitlines())
