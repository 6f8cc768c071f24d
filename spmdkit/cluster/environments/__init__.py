"""How starters (Slurm, torchrun, Kubernetes, ...) assign a rank to a process. One file per starter, see base.py."""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import Environment
from spmdkit.foundation import plugins


def all_environments() -> Mapping[str, Environment]:
    """Returns name -> environment, sorted by name."""
    return plugins.load_all("environments")
