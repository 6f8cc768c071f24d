"""How starters (Slurm, torchrun, Kubernetes, ...) give a process its rank: one file each.

In: environment variables. Out: a `DetectedCluster` or a `Partial`, see base.py.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import cast

from spmdkit.cluster.environments.base import Environment


def all_environments() -> Mapping[str, Environment]:
    """Returns name -> module of every environment in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    return {name: cast(Environment, importlib.import_module(f"{__name__}.{name}")) for name in names}
