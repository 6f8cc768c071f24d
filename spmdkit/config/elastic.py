"""The section `elastic` of a config."""

from __future__ import annotations

from pydantic import Field

from spmdkit.config import fields
from spmdkit.config.fields import Section


class ElasticOptions(Section):
    """How a job goes on without a process that dies, under launch --elastic MIN:MAX."""

    in_process: fields.Flag = Field(
        default=False,
        description="The other processes go on, with the state from their memory; false: all are started again, from the newest checkpoint. CPU devices.",
    )
    peer_every: fields.Count = Field(
        default=10,
        description="Steps between two copies of the state in the memory of its processes, each shard on two of them: as many are repeated at most.",
    )
