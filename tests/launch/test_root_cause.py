"""Who is to blame when several processes die."""

import json
import sys
from collections import deque

import pytest

from spmdkit.launch.process import start
from spmdkit.launch.root_cause import Exit, cause
from spmdkit.launch.supervisor import Child, ReportFile, Supervisor, end

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
        # who cannot reach the service names no process, and may be cut off itself
        ([{**PEER_LOST, "time": 3.0}, {**PEER_LOST, "blamed": (0,)}], 1, 75),
        ([PEER_LOST, {**PEER_LOST, "time": 3.0}], 1, 75),
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


def test_blamed_rank_is_mapped_to_its_process():
    """Process 1 is gone; process 0 misses rank 1, which is process 2, and leaves with 75."""
    deaths = ReportFile()
    code = {0: "import sys; sys.exit(75)", 2: "import time; time.sleep(60)", 3: "import time; time.sleep(60)"}
    children = [
        Child(p, start([sys.executable, "-ISc", code[p]], start_new_session=True), *(ReportFile() for _ in range(3)))
        for p in code
    ]
    children[0].errors.write(json.dumps({"message": "rank 1 is silent", "time": 1.0, "blamed": [1]}))
    supervisor = Supervisor(children, deque(), 5.0, deaths)
    supervisor.members = lambda: (0, 2, 3)
    try:
        supervisor.run()
        assert {c.process: c.exit.blamed for c in children} == {0: (2,), 2: (), 3: ()}
        told = json.loads(deaths.read())
        assert sorted(told) == ["0", "1", "2"], "of the processes 0, 2 and 3"
        assert told["0"]["message"] == "rank 1 is silent"
    finally:
        end(children)
        deaths.close()
