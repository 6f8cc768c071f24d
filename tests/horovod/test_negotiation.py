"""The negotiation before anything is sent: the decision of a round; rounds over a store, with threads for ranks; local
and cross ranks."""

import threading

import pytest

from spmdkit.cluster.store import MemoryStore
from spmdkit.horovod.negotiation import Blackboard, HorovodInternalError, Rounds, StallTimeouts, decide
from spmdkit.horovod.topology import place


def want(name, op="allreduce", reduce="Sum", **said):
    return {"name": name, "op": op, "reduce": reduce, "dtypes": ["float32"], "shapes": [[3]], **said}


JOINED = {"name": "join", "op": "join"}


def test_common_requests_run_in_order_of_lowest_rank():
    decision = decide({0: [want("b"), want("a")], 1: [want("a"), want("b"), want("c")]})
    assert [name for name, _ in decision.run] == ["b", "a"] and not decision.errors and decision.deadlock is None


def test_ranks_with_different_names_wait_indefinitely():
    assert decide({0: [want("a"), want("x")], 1: [want("a")]}).deadlock is None  # something runs
    deadlock = decide({0: [want("a")], 2: [want("b", op="barrier", reduce=None, dtypes=[], shapes=[])]}).deadlock
    assert "rank 0: allreduce Sum float32[3] 'a'; rank 2: barrier 'b'" in deadlock


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (want("a", op="allgather", reduce=None), "mismatched operation"),
        (want("a", reduce="Max"), "mismatched reduction"),
        (want("a", dtypes=["int32"]), "mismatched dtypes"),
        (want("a", shapes=[[4]]), "mismatched shapes"),
        (want("a", root=1), "mismatched root"),
        (want("a", prescale=2.0), "mismatched prescale"),
        (want("a", leaves=["['head']"]), "mismatched names of leaves"),
    ],
)
def test_differing_descriptions_are_an_error_per_rank(other, what):
    decision = decide({0: [want("a")], 1: [other]})
    assert not decision.run
    assert what in decision.errors["a"] and "rank 0:" in decision.errors["a"] and "rank 1:" in decision.errors["a"]


def test_differing_leaf_names_are_reported_per_rank():
    names = (["['w']", "['head']"], ["['w']", "['tail']"])
    decision = decide({rank: [want("a", leaves=of), want("b")] for rank, of in enumerate(names)})
    error = decision.errors.pop("a")
    assert "rank 0: allreduce Sum float32[3] 'a' with ['head'];" in error and "with ['tail']" in error
    assert "['w']" not in error
    assert not decision.errors and [name for name, _ in decision.run] == ["b"]  # an error affects no other name


def test_joined_rank_takes_part_in_sums_only():
    decision = decide({0: [want("a")], 1: [JOINED]})
    assert decision.run == [("a", {0: want("a"), 1: None})]
    for op, reduce in (("allreduce", "Max"), ("allgather", None), ("reducescatter", "Sum"), ("barrier", None)):
        error = decide({0: [want("a", op=op, reduce=reduce)], 1: [JOINED]}).errors["a"]
        assert "not supported while ranks have joined" in error and "[1]" in error
    decision = decide({0: [JOINED], 1: [JOINED]})
    assert decision.joined == [0, 1] and decision.deadlock is None and not decision.run


SHORT = StallTimeouts(shutdown_s=20.0)


def on_ranks(size, body, timeouts=SHORT, present=None):
    """Returns what `body(rounds, rank)` returns or raises on each rank that is present, one thread each."""
    store, found = MemoryStore(), {}

    def run(rank):
        board = Blackboard(store, "hvd", rank, timeouts)
        try:
            found[rank] = body(Rounds(board, 0, range(size)), board)
        except HorovodInternalError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (range(size) if present is None else present)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found, store


def test_every_rank_gets_the_same_table():
    def body(rounds, board):
        return [rounds.exchange([want(f"{step} {board.rank}")]) for step in range(5)]

    found, store = on_ranks(3, body)
    assert found[0] == found[1] == found[2]
    assert [want["name"] for want in found[1][4][2]] == ["4 2"]
    assert {key.split("/")[1] for key in store.entries("hvd")} == {"4"}


def test_missing_rank_is_named_on_every_rank():
    begun = threading.Event()

    def body(rounds, board):
        if board.rank == 2:
            begun.wait(30)
        try:
            return rounds.exchange([want("a")])
        finally:
            begun.set()

    found, _ = on_ranks(3, body, StallTimeouts(60.0, 0.3))
    for rank in range(3):
        assert "rank 2 did not call it within 0 s" in found[rank] and "rank 0 waits in allreduce" in found[rank]


def test_failing_rank_ends_the_wait_of_others():
    def body(rounds, board):
        if board.rank == 1:
            return board.report_failure("ValueError: no data")
        return rounds.exchange([want("a")])

    found, _ = on_ranks(3, body)
    assert "rank 1 ended (ValueError: no data)" in found[0] and "rank 1 ended" in found[2]


def test_a_long_wait_is_reported_once(capfd):
    on_ranks(2, lambda rounds, board: rounds.exchange([want("a")]), StallTimeouts(0.4, 1.5), present=[0])
    err = capfd.readouterr().err
    assert err.count("rank(s) [1] have not called it") == 1


def test_horovod_variables_set_the_stall_limits():
    assert StallTimeouts.of({}) == (60.0, 600.0)
    asked = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
    assert StallTimeouts.of(asked) == (5.0, 30.0)
    assert StallTimeouts.of({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}).shutdown_s == 600.0


def test_places_within_and_across_hosts():
    hosts = ["a", "a", "b", "a", "b"]
    assert place(hosts, 3) == {"local_rank": 2, "local_size": 3, "cross_rank": 0, "cross_size": 1}
    assert place(hosts, 4) == {"local_rank": 1, "local_size": 2, "cross_rank": 1, "cross_size": 2}
