"""What processes tell each other: threads play the processes over one store."""

import pytest

from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.comparison import name_processes
from spmdkit.cluster.store import MemoryStore
from spmdkit.errors import CheckpointError, RendezvousError, UserCodeError
from tests.support.clusters import on_all


def test_single_process_waits_for_none():
    cluster = Cluster(process_index=0, num_processes=1, devices=[], store=MemoryStore())
    assert cluster.is_main
    assert [cluster.agree("stop", s, r, lag=2) for s, r in [(1, False), (2, True)]] == [False, True]
    cluster.barrier("here")
    cluster.same_everywhere("config", "x")
    cluster.put("a", "1")
    assert cluster.get("a") == "1"
    cluster.shutdown()


def test_waiting_for_a_missing_value_ends():
    [error] = on_all(1, lambda cluster: cluster.get("never", timeout_s=0.01))
    assert "'never', which no process has published" in str(error)


def test_barrier_names_the_missing_processes():
    errors = on_all(4, lambda cluster: cluster.barrier("restore", timeout_s=0.2), absent=(1, 3))
    assert all(
        "barrier 'restore'" in str(errors[p]) and "processes 1 and 3 did not reach it" in str(errors[p]) for p in (0, 2)
    )
    assert errors[0].exit_code == 75


def test_barrier_name_can_be_used_again():
    act = lambda cluster: [cluster.barrier("save", timeout_s=10) for _ in range(3)]
    assert on_all(3, act) == [[None] * 3] * 3


def test_gather_returns_the_values_in_order():
    expected = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert on_all(3, lambda cluster: cluster.gather("ranks", {"rank": cluster.process_index}, 10)) == [expected] * 3


def test_every_process_gets_the_value_of_main():
    act = lambda cluster: cluster.from_main("step", lambda: [cluster.process_index, "seven"], 10)
    assert on_all(3, act) == [[0, "seven"]] * 3


def test_an_error_on_main_is_raised_everywhere():
    def act(cluster):
        def make():
            raise CheckpointError("step 7 is damaged")

        cluster.from_main("step", make, 10)

    errors = on_all(3, act)
    assert {type(error) for error in errors} == {CheckpointError}
    assert {str(error) for error in errors} == {"step 7 is damaged"}


@pytest.mark.parametrize("process", [0, 1, 2])
def test_problem_of_one_process_is_returned_everywhere(process):
    problem = lambda cluster: "too large" if cluster.process_index >= process else ""
    act = lambda cluster: (cluster.first_problem("memory", lambda: problem(cluster), 10), cluster.gather("next", 1, 10))
    assert on_all(3, act) == [("too large", [1, 1, 1])] * 3
    assert on_all(3, lambda cluster: cluster.first_problem("memory", lambda: "", 10)) == [""] * 3


@pytest.mark.parametrize("process", [0, 1])
def test_check_that_raises_blocks_no_process(process):
    def act(cluster):
        def check():
            if cluster.process_index == process:
                raise UserCodeError("a bug")
            return ""

        cluster.first_problem("memory", check, 10)

    errors = on_all(3, act)
    assert isinstance(errors.pop(process), UserCodeError)
    assert all(isinstance(error, RendezvousError) and f"process {process} failed" in str(error) for error in errors)


def test_different_facts_are_rejected_everywhere():
    def act(cluster):
        cluster.same_everywhere("versions", lambda: {"jax": "1"})
        cluster.same_everywhere("config", f"seed: 0\nsteps: {20 if cluster.process_index == 2 else 10}\n")

    errors = on_all(3, act)
    assert len({str(e) for e in errors}) == 1
    assert "process 2 differs from process 0: line 2 is 'steps: 20' instead of 'steps: 10'" in str(errors[0])
    assert errors[1].exit_code == 78


def test_missing_process_is_named_in_an_exchange():
    errors = on_all(3, lambda cluster: cluster.gather("ranks", 1, 0.1), absent=(1,))
    assert {str(errors[0]), str(errors[2])} == {str(errors[0])}
    assert str(errors[0]).startswith("process 1 did not report ranks within 0.1 s")


def test_names_of_processes():
    assert name_processes([3]) == "process 3"
    assert name_processes([1, 2]) == "processes 1 and 2"
    assert name_processes(list(range(100))) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
