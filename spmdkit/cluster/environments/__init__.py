"""How starters (Slurm, torchrun, Kubernetes, ...) give a process its rank: one file each, see base.py."""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import Environment
from spmdkit.foundation import plugins


def all_environments() -> Mapping[str, Environment]:
    """Returns name -> environment, by name."""
    return plugins.load_all("environments")
