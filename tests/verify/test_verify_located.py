"""Mistakes of users and of the toolkit in five natural tasks: `verify` sees each, and says a line that is right, or
none."""

import pytest

from tests.support import located
from tests.support.forms import slow_except

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

QUICK = ["cnn median_of_a_shard", "recurrent key_forgotten", "contrastive gradient_by_rows"]
QUICK_OTHERS = ["long denominators_averaged", "recurrent statistic_of_a_shard"]

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


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_line_is_located(case):
    assert located.locate_line(*case.split()).verdict == "right"


@pytest.mark.parametrize("case", slow_except(QUICK_OTHERS, located.OTHERS))
def test_line_is_located_on_other_meshes(case):
    found = located.locate_line(*located.OTHERS[case])
    assert found.verdict == "right", found


@pytest.mark.forms(1)
@pytest.mark.parametrize(("case", "says"), WORDS.items())
def test_difference_and_axes_are_reported(case, says):
    found = located.locate_line(*located.OTHERS.get(case, case.split()))
    assert says in found.text, found


@pytest.mark.slow
@pytest.mark.parametrize("task", located.TASKS)
def test_four_in_five_kinds_are_located(task):
    outcomes = {name: located.locate_line(task, name) for name in (*located.USERS, *located.TOOLKITS)}
    verdicts = [found.verdict for found in outcomes.values()]
    assert len(outcomes) >= 20 and set(verdicts) <= {"right", "silent"}, outcomes
    assert verdicts.count("right") >= 0.8 * len(verdicts), outcomes


@pytest.mark.slow
@pytest.mark.parametrize("task", located.TASKS)
@pytest.mark.parametrize("name", located.USERS)
def test_mistake_is_one_statement(task, name):
    """The text with the mistake is the task's own but for the line, and is Python."""
    text, wrong = located.changed(located.text_of(task), located.USERS[name])
    compile(text, task, "exec")
    kept = [line for i, line in enumerate(text.splitlines(), 1) if i not in wrong]
    assert len(wrong) <= 2 and set(kept) < set(located.text_of(task).splitlines())
