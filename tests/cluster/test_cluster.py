"""What processes tell each other: threads play the processes over one store."""

import pytest

from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.comparison import name_processes
from spmdkit.cluster.store import MemoryStore
from spmdkit.errors import CheckpointError, RendezvousError, UserCodeError
from tests.support.threads import in_threads


def play(num_processes, act, absent=()):
    """Runs `act(cluster)` in a thread per process; returns each one's result or exception."""
    store = MemoryStore(num_processes)
    clusters = {
        p: Cluster(process_index=p, num_processes=num_processes, devices=[], store=store, namespace="test")
        for p in range(num_processes)
        if p not in absent
    }
    found = in_threads(act, clusters)
    return [found.get(process) for process in range(num_processes)]


def test_one_process_needs_nobody():
    cluster = Cluster(process_index=0, num_processes=1, devices=[], store=MemoryStore())
    assert cluster.is_main
    assert [cluster.agree("stop", s, r, lag=2) for s, r in [(1, False), (2, True)]] == [False, True]
    cluster.barrier("here")
    cluster.same_everywhere("config", "x")
    cluster.put("a", "1")
    assert cluster.get("a") == "1"
    cluster.shutdown()


def test_what_one_puts_the_others_get():
    def act(cluster):
        if cluster.is_main:
            cluster.put("run", "seven")
        return cluster.get("run", timeout_s=10)

    assert play(3, act) == ["seven"] * 3


def test_waiting_for_what_nobody_puts_ends():
    [error] = play(1, lambda cluster: cluster.get("never", timeout_s=0.01))
    assert "'never', which no process has published" in str(error)


def test_a_barrier_names_the_missing_processes():
    errors = play(4, lambda cluster: cluster.barrier("restore", timeout_s=0.2), absent=(1, 3))
    assert all(
        "barrier 'restore'" in str(errors[p]) and "processes 1 and 3 did not come" in str(errors[p]) for p in (0, 2)
    )
    assert errors[0].exit_code == 75


def test_a_barrier_can_be_met_again_under_the_same_name():
    def act(cluster):
        for _ in range(3):
            cluster.barrier("save", timeout_s=10)
        return "through"

    assert play(3, act) == ["through"] * 3


def test_gather_returns_the_values_in_order():
    expected = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert play(3, lambda cluster: cluster.gather("ranks", {"rank": cluster.process_index}, 10)) == [expected] * 3


def test_every_process_gets_the_value_of_main():
    def act(cluster):
        return cluster.from_main("step", lambda: [cluster.process_index, "seven"], 10)

    assert play(3, act) == [[0, "seven"]] * 3


def test_an_error_on_main_is_raised_everywhere():
    def act(cluster):
        def make():
            raise CheckpointError("step 7 is damaged")

        cluster.from_main("step", make, 10)

    errors = play(3, act)
    assert {type(error) for error in errors} == {CheckpointError}
    assert {str(error) for error in errors} == {"step 7 is damaged"}


@pytest.mark.parametrize("process", [0, 1, 2])
def test_a_problem_of_one_process_is_everyones(process):
    problem = lambda cluster: "too large" if cluster.process_index >= process else ""
    act = lambda cluster: (cluster.first_problem("memory", lambda: problem(cluster), 10), cluster.gather("next", 1, 10))
    assert play(3, act) == [("too large", [1, 1, 1])] * 3
    assert play(3, lambda cluster: cluster.first_problem("memory", lambda: "", 10)) == [""] * 3


@pytest.mark.parametrize("process", [0, 1])
def test_a_check_that_raises_blocks_no_process(process):
    def act(cluster):
        def check():
            if cluster.process_index == process:
                raise UserCodeError("a bug")
            return ""

        cluster.first_problem("memory", check, 10)

    errors = play(3, act)
    assert isinstance(errors.pop(process), UserCodeError)
    assert all(isinstance(error, RendezvousError) and f"process {process} failed" in str(error) for error in errors)


def test_equal_texts_pass():
    def act(cluster):
        for _ in range(2):
            cluster.same_everywhere("config", "steps: 10\n")

    assert play(3, act) == [None] * 3


def test_different_texts_are_refused_by_all_with_the_first_difference():
    def act(cluster):
        cluster.same_everywhere(
            "config", "seed: 0\nsteps: 10\n" if cluster.process_index != 2 else "seed: 0\nsteps: 20\n"
        )

    errors = play(3, act)
    assert len({str(e) for e in errors}) == 1
    assert "process 2 differs from process 0: line 2 is 'steps: 20' instead of 'steps: 10'" in str(errors[0])
    assert errors[1].exit_code == 78


def test_processes_are_named_for_people():
    assert name_processes([3]) == "process 3"
    assert name_processes([1, 2]) == "processes 1 and 2"
    assert name_processes(list(range(100))) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
