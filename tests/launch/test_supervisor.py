"""Who is to blame where ranks and the launcher's own numbers are not the same: after an epoch with fewer processes."""

import json
import sys
from collections import deque

from spmdkit.launch.process import start
from spmdkit.launch.supervisor import Child, Note, Supervisor, end


def test_a_blamed_rank_is_mapped_to_its_process():
    """Process 1 is gone; process 0 misses rank 1, which is process 2, and leaves with 75."""
    deaths = Note()
    code = {0: "import sys; sys.exit(75)", 2: "import time; time.sleep(60)", 3: "import time; time.sleep(60)"}
    children = [
        Child(p, start([sys.executable, "-I", "-S", "-c", code[p]], start_new_session=True), Note(), Note(), Note())
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
