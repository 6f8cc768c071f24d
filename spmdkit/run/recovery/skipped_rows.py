"""The rows of the data that all processes have skipped so far, for the checkpoint's record: a restart skips the same
rows."""

from __future__ import annotations

from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.program.program import Program


def left_out_rows(config: Config, cluster: Cluster, program: Program) -> list[list[int]]:
    """Returns [batch, row] of the rows that any process has skipped, on process 0. All processes call it at each
    save."""
    mine = program.skipped_rows[0].positions()
    if not config.data.max_bad_examples or cluster.num_processes == 1:
        return mine
    return sorted(place for places in cluster.gather("skipped rows", mine) for place in places)
