"""The section `elastic` of a config."""

from __future__ import annotations

from pydantic import Field

from spmdkit.config import fields
from spmdkit.config.fields import Section


class ElasticOptions(Section):
    """How a job goes on without a process that dies, under launch --elastic MIN:MAX."""

    in_process: fields.Flag = Field(
        default=False,
        description=(
            "The other processes go on, with the state from their memory; false: all are started again, from "
            "the newest checkpoint. CPU devices."
        ),
    )
    snapshot_every: fields.Count = Field(
        default=10,
        description=(
            "Steps between two copies of the state in the memory of its processes, each shard on two of "
            "them: as many are repeated at most."
        ),
    )
    standby: fields.FewOrNone = Field(
        default=0,
        description=(
            "Processes that wait on this machine, with everything imported, to take the place of one that "
            "dies: each has the memory of a process before its first step."
        ),
    )
    precompile: fields.Sizes = Field(
        default=[],
        description=(
            "Numbers of processes for which the step is compiled ahead, into the compile cache, by a job of "
            "so many processes at the lowest priority."
        ),
    )
