"""Loads an example file as a module."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load_example(monkeypatch):
    """Returns a function from an example's name to its module."""

    def load(name: str):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        if name in sys.modules and not str(sys.modules[name].__file__).startswith(str(EXAMPLES)):
            monkeypatch.delitem(sys.modules, name)
        return importlib.import_module(name)

    return load
