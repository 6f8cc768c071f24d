"""Mistakes of users and of the toolkit in five natural tasks: `verify` sees each, and says a line that is right, or
none."""

import pytest

from tests.support import located

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

QUICK = ["cnn median_of_a_shard", "recurrent key_forgotten", "contrastive gradient_by_rows"]
QUICK_OTHERS = ["long places_in_the_shard", "long denominators_averaged", "recurrent key_forgotten"]

WORDS = {
    "long softmax_of_a_shard": (
        ":37 (attention): broadcast_in_dim [8, 8, 1] is each shard's own sum over context, used as if it were of all"
    ),
    "moe statistic_of_a_shard": "is each shard's own mean over data, used as if it were of all",
    "contrastive times_replicas": "is 4 times that of one device: the size of data",
    "moe key_forgotten": "random_bits [4, 6, 8] draws other numbers than one device",
    "moe place_in_the_shard": "iota [4] counts within each shard, and not over all of them",
}
"""Task and kind -> the words: a missing sum, a shard's statistic, a factor, noise, an index; a permutation is in
test_verify_locate.py."""


@pytest.mark.forms(1)
@pytest.mark.parametrize("case", QUICK)
def test_the_line_that_is_wrong_is_told(case):
    assert located.told(*case.split()).verdict == "right"


@pytest.mark.parametrize(
    "case", [case if case in QUICK_OTHERS else pytest.param(case, marks=pytest.mark.slow) for case in located.OTHERS]
)
def test_so_it_is_where_parameters_are_cut_and_inside_of_a_part_that_is_cut_over_context(case):
    found = located.told(*located.OTHERS[case])
    assert found.verdict == "right", found


@pytest.mark.forms(2)
@pytest.mark.parametrize(("case", "says"), WORDS.items())
def test_a_line_is_told_with_how_the_value_differs_and_over_which_axes(case, says):
    found = located.told(*located.OTHERS.get(case, case.split()))
    assert says in found.words, found


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
