"""Bugs in five natural tasks and in spmdkit: `verify` detects each, and reports the right line or none."""

import pytest

from tests.support import located
from tests.support.forms import slow_except

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

QUICK = ["cnn local_median", "recurrent no_example_keys", "contrastive gradient_times_local_rows"]
QUICK_SHARDED = ["long averaged_denominator", "recurrent local_mean"]

REPORTS = {
    "long local_denominator": (
        ":37 (attention): broadcast_in_dim [8, 8, 1] is each shard's local sum, not reduced over context"
    ),
    "moe local_mean": "is each shard's local mean, not reduced over data",
    "contrastive multiplied_by_replicas": "is 4 times the value on one device: the size of data",
    "moe no_example_keys": "random_bits [4, 6, 8] draws different random numbers than one device",
    "moe local_row_index": "iota [4] counts within each shard, not across shards",
}
"""`task name` -> part of the report. A permutation is in test_verify_locate.py."""


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_line_is_located(case):
    assert located.locate_bug(*case.split()).verdict == located.RIGHT


@pytest.mark.parametrize("case", slow_except(QUICK_SHARDED, located.SHARDED))
def test_line_is_located_on_meshes_that_shard_parameters_or_the_sequence(case):
    outcome = located.locate_bug(*located.SHARDED[case])
    assert outcome.verdict == located.RIGHT, outcome


@pytest.mark.forms(1)
@pytest.mark.parametrize(("case", "report"), REPORTS.items())
def test_difference_and_axes_are_reported(case, report):
    outcome = located.locate_bug(*located.SHARDED.get(case, case.split()))
    assert report in outcome.report, outcome


@pytest.mark.slow
@pytest.mark.parametrize("task", located.TASKS)
def test_four_in_five_bugs_are_located(task):
    outcomes = {name: located.locate_bug(task, name) for name in (*located.TASK_BUGS, *located.MUTANT_FUNCTIONS)}
    verdicts = [outcome.verdict for outcome in outcomes.values()]
    assert len(outcomes) >= 20 and set(verdicts) <= {located.RIGHT, located.NO_LINE}, outcomes
    assert verdicts.count(located.RIGHT) >= 0.8 * len(verdicts), outcomes


@pytest.mark.slow
@pytest.mark.parametrize("task", located.TASKS)
@pytest.mark.parametrize("name", located.TASK_BUGS)
def test_bug_is_one_statement(task, name):
    """All other lines are those of the task, and the text is Python."""
    text, wrong = located.changed(located.text_of(task), located.TASK_BUGS[name])
    compile(text, task, "exec")
    rest = [line for i, line in enumerate(text.splitlines(), 1) if i not in wrong]
    assert len(wrong) <= 2 and set(rest) < set(located.text_of(task).splitlines())
