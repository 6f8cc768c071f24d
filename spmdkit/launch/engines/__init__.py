"""Engines that people already have: each renders what starts a job on it, as text. The interface is in base.py; what is
done with it in submit.py."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import cast

from spmdkit.launch.engines.base import Engine


def all_engines() -> Mapping[str, Engine]:
    """Returns name -> module of every engine in this folder."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ("base", "submit", "pods"))
    return {name: cast(Engine, importlib.import_module(f"{__name__}.{name}")) for name in names}
