"""Tests of plans use the programs of this folder, and the models of tests/core."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "core")]
