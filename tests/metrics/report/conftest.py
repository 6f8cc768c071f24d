"""Tests here use the models and comparisons of tests/core."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))
