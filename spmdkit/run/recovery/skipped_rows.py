"""The rows of the data that all processes have skipped so far, for the checkpoint's record: a restart skips the same
rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def left_out_rows(run: Run) -> list[list[int]]:
    """Returns [batch, row] of the rows that any process has skipped, on process 0. All processes call it at each
    save."""
    mine, cluster = run.program.skipped_rows[0].positions(), run.cluster
    if not run.config.data.max_bad_examples or cluster.num_processes == 1:
        return mine
    return sorted(place for places in cluster.gather("skipped rows", mine) for place in places)
