"""How starters tell a process its place in a cluster: a file each, found by its name. The interface is in base.py."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import cast

from spmdkit.cluster.environments.base import Dialect


def all_dialects() -> Mapping[str, Dialect]:
    """Returns name -> module of every dialect in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    return {name: cast(Dialect, importlib.import_module(f"{__name__}.{name}")) for name in names}
