"""Engines such as schedulers: each renders the files and commands that start a job on it (base.py)."""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.foundation import plugins
from spmdkit.launch.engines.base import Engine


def all_engines() -> Mapping[str, Engine]:
    """Returns name -> engine, by name."""
    return plugins.load_all("engines")
