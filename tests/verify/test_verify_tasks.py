"""`verify` on the natural programs of tests/tasks: no rounding, draw or small gradient is reported as a difference, and
no mistake in them is missed."""

import pytest

from spmdkit.verify.mutants import MUTANTS
from tests.support.tasks import MESHES
from tests.support.verified_tasks import CAUGHT, MISSED, NAMES, ONE_OF_EACH, PAGE, mutants_of, runner_of

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

CASES = [("data 4", 1), ("data 2 x fsdp 2", 1), ("data 2 x tensor 2", 1), ("data 4", 2)]


def test_equinox_task_is_verified_with_a_mutant():
    """The small form of the next two."""
    case_runner = runner_of("equinox_mlp")
    assert case_runner.compare_with_plain_jax()["passed"] and case_runner.case({"data": 2}, 1, whole=True)["passed"]
    assert case_runner.mutant("reduction_doubled", 2)["caught"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_false_alarm(name):
    case_runner = runner_of(name)
    assert case_runner.compare_with_plain_jax().get("passed", True)
    for mesh, microbatches in CASES:
        found = case_runner.case(MESHES[mesh], microbatches, whole=microbatches == 1)
        skipped = microbatches > 1 and "train_step" in found.get("skipped", "")  # which takes none
        assert found.get("passed") or skipped, (mesh, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_mutant_is_missed(name):
    found = mutants_of(name)
    assert MISSED not in found.values(), found
    assert found["checkpoint_loses_leaf"].startswith(CAUGHT), found


def test_page_has_every_mutant_and_none_missed():
    page = PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == [mutant.name for mutant in MUTANTS]
    assert all(row[-1] == "none |" for row in rows)
    assert f"{len(ONE_OF_EACH)} tasks" in page
