"""`sk.testing.assert_collectives` passes on what is there, and says what it found when it does not."""

import pytest

import spmdkit as sk
from tests.plan.bad_programs import good_loss, task
from tests.support.core_runs import program_of

pytestmark = pytest.mark.locations


@pytest.fixture(scope="module")
def mirrored():
    return program_of(task(good_loss), mesh={"data": 8}, microbatches=4, batch_size=512)


def test_the_number_of_collectives_can_be_asserted(mirrored):
    sk.testing.assert_collectives(mirrored, all_reduce=1, in_loop=0)
    sk.testing.assert_collectives(mirrored, all_reduce=1, all_gather=0, total=1, axes=("data",))
    sk.testing.assert_collectives(mirrored, total=0, axes=("tensor",))
    parameters_and_two_sums = 2 * 7 * 4 * (2 * 256 * 512 + 2) // 8
    sk.testing.assert_collectives(mirrored, max_bytes=parameters_and_two_sums)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"all_reduce": 2}, "all_reduce 1 times, expected 2"),
        ({"all_gather": 1}, "all_gather 0 times, expected 1"),
        ({"in_loop": 1}, "0 inside loops, expected 1"),
        ({"total": 3}, "1 in all, expected 3"),
        ({"max_bytes": 1000}, "sent per device in a step, expected at most 1000"),
    ],
)
def test_a_difference_lists_every_operation(mirrored, asked, said):
    with pytest.raises(AssertionError, match=said) as error:
        sk.testing.assert_collectives(mirrored, **asked)
    assert "all_reduce over data, f32" in str(error.value)
    assert "gradient reduction, spmdkit/communication/reducers/sum.py:" in str(error.value)


def test_a_name_of_no_collective_is_refused(mirrored):
    with pytest.raises(sk.SpmdkitError, match=r"'all_reduces' is no collective.*Did you mean 'all_reduce'"):
        sk.testing.assert_collectives(mirrored, all_reduces=1)
    with pytest.raises(sk.SpmdkitError, match=r"'dota' is not a mesh axis.*Did you mean 'data'"):
        sk.testing.assert_collectives(mirrored, axes=("dota",))
