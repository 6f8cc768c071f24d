"""Horovod's semantics on 2, 3 and 4 processes: one set of processes runs the whole table of semantics.py.

Three processes run it with all dtypes and shapes, two and four with few, 25 processor seconds for each; they start as
users' do, since that is what is tested.
"""

import json
import sys

import pytest

from tests.horovod.semantics import ROWS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Returns size -> for each rank, row -> None or its traceback; the processes of a size run once."""
    known = {}

    def of(size):
        if size not in known:
            out = tmp_path_factory.mktemp(f"ranks{size}")
            form = [] if size == 3 else ["short"]
            command = [sys.executable, "-m", "tests.horovod.semantics", str(out), *form]
            ended = run_ranks(command, size, timeout_s=280 if size == 2 else 900)
            found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]
            known[size] = ended, found
        return known[size]

    return of


SIZES = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("row", ROWS)
def test_each_row_holds_on_every_rank(table, size, row):
    for rank, rows in enumerate(table(size)[1]):
        assert row in rows, f"rank {rank} did not get here: an earlier row failed"
        assert rows[row] is None, f"rank {rank} of {size}: {rows[row]}"


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_ends_well(table, size):
    for process in table(size)[0]:
        assert process.code == 0, process.output
