"""Distributions for tests of plug-ins: a module and the metadata that pip would install."""

import inspect
import sys
from pathlib import Path

import pytest

from spmdkit.foundation import plugins


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, group: str, name: str, text: str) -> None:
    """Installs a distribution for one test: a module with `text` in `folder`, as the plug-in `name` of a group."""
    (folder / f"{name}_plugin.py").write_text(text)
    metadata = folder / f"{name}_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[spmdkit.{group}]\n{name} = {name}_plugin\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, f"{name}_plugin", raising=False)
    monkeypatch.setattr(plugins, "_entry_points", inspect.unwrap(plugins._entry_points))
