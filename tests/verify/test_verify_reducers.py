"""What `verify` compares under each reducer, and what its report says of those that are no sum."""

import pytest

import spmdkit as sk
from spmdkit.foundation import plugins
from spmdkit.program.step_context import reducer_of
from spmdkit.verify.cases import exact_reducer, reducer_note
from tests.support import verify_tasks as tasks
from tests.support.verify_tasks import case_runner

pytestmark = pytest.mark.promotes("tasks as users write them: masks of bools times numbers")

EXACT = {"sum": "sum", "ordered": "ordered", "sparse_rows": {"sparse_rows": {"leaves": ["w"], "rows": 2}}}
ROUNDED = {"bfloat16", "float8", "int8", "powersgd", "sign", "topk", "hierarchical"}


def config(reducer):
    return sk.Config(task="t.py:t", reducer=reducer)


def test_every_reducer_but_adasum_is_compared_where_exact():
    assert {*EXACT, *ROUNDED, "adasum"} == {*plugins.names("reducers")}
    for name, choice in EXACT.items():
        assert plugins.split(exact_reducer(config(choice)))[0] == name and reducer_note(config(choice)) is None
    for name in ROUNDED:
        proven = exact_reducer(config(name))
        assert proven == {name: dict(reducer_of(config(name)).exact_options)}
        assert reducer_note(config(name)).startswith(f"reducer {name} is not exact. verify compares {proven},")
        assert reducer_note(config(proven)) is None
    assert exact_reducer(config("adasum")) == "sum"
    assert reducer_note(config("adasum")).endswith("verify compares sum and does not check adasum")


@pytest.mark.forms(1)
@pytest.mark.parametrize("name", ["int8", "adasum"])
def test_a_right_task_passes_and_a_wrong_one_does_not_under_a_reducer_that_is_no_sum(name):
    found = case_runner(tasks.right, reducer=name).case({"data": 2}, 1, whole=False)
    assert found["passed"] and found["reducer"] == exact_reducer(config(name)), found
    found = case_runner(tasks.summed_twice, reducer=name).case({"data": 2}, 1, whole=False)
    assert found["diagnosis"]["kind"] == "reduced twice"
