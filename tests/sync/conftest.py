"""The folder's own modules and those of the core tests on the path, and programs that compile in half the time."""

import sys
from pathlib import Path

import jax
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "core")]


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """XLA's expensive passes off: what is compared is the mathematics, and the collectives are the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
