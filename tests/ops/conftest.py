"""Tests of ops use the models and comparisons of tests/core."""

import sys
from pathlib import Path

import jax
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parent)]


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """XLA's expensive passes off, but for the tests that look at the compiled program (modules that end with `wire`)."""
    if request.module.__name__.endswith("wire"):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
