"""Who is to blame when several processes die."""

import pytest

from spmdkit.launch.root_cause import Exit, cause

USER = {"status": 70, "message": "the user's function raised", "time": 5.0}
PEER_LOST = {"status": 75, "message": "lost contact with another process", "time": 4.0}


@pytest.mark.parametrize(
    ("exits", "first", "code"),
    [
        ([{"status": 0}, {"status": 0}], None, 0),
        ([{"status": 0}, {"status": 3}], 1, 3),
        # the process with an error of its own, whoever was seen first
        ([{"status": -6}, USER], 1, 70),
        ([{"status": -9}, USER], 1, 70),
        ([{**USER, "time": 6.0}, USER], 1, 70),
        # who says that it is another one's fault is not it, if he was faster
        ([{**USER, "time": 4.0, "blamed": (1,)}, USER], 1, 70),
        # an error that only tells of a peer is weaker than that peer's death
        ([PEER_LOST, {"status": -9}], 1, 137),
        ([PEER_LOST, {"status": 1}], 1, 1),
        ([PEER_LOST, {"status": -6}], 0, 75),
        # JAX aborts when a peer dies
        ([{"status": -6}, {"status": -11}], 1, 139),
        ([{"status": 134}, {"status": 1}], 1, 1),
        ([{"status": -6}, {"status": -6}], 0, 134),
        # what we killed ourselves is never the cause
        ([{"status": -9, "ended_by_us": True}, {"status": -6}], 1, 134),
        ([{"status": 42}, {"status": 42}], 0, 42),
        # a saved stop is a saved stop, also when the coordinator left before its peers did
        ([{"status": 42, "message": "saved"}, {"status": -6}], 0, 42),
        ([PEER_LOST, {"status": 42}], 1, 42),
        ([{"status": 42}, {"status": 74, "message": "disk full"}], 1, 74),
        ([{"status": 42}, {"status": -9, "ended_by_us": True}], 0, 42),
    ],
)
def test_process_that_failed_first_is_found(exits, first, code):
    found = cause([Exit(process=i, order=i, **e) for i, e in enumerate(exits)])
    assert (None if found is None else found.process) == first
    assert (0 if found is None else found.code) == code
