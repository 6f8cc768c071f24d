"""A rank that raises ends the others within seconds, by name; real processes without a launcher."""

import sys

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

SCRIPT = """
import numpy as np
import spmdkit.horovod as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    raise ValueError("no data here")
try:
    hvd.allreduce(np.ones(3))
except hvd.HorovodInternalError as error:
    print("told:", error)
    raise
"""


def test_rank_that_raises_is_named_without_waiting():
    first, second = run_ranks([sys.executable, "-c", SCRIPT], 2, timeout_s=60)
    assert (first.code, second.code) == (1, 1)
    assert "told: rank 1 ended (ValueError: no data here) while rank 0 waits in allreduce Average" in first.output
    assert "ValueError: no data here" in second.output
