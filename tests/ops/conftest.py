"""Tests of ops use the models and comparisons of tests/core."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parent)]
