"""How starters tell a process its place in a cluster: a file each, found by its name. The interface is in base.py."""

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
