"""What these tests share: the folder's own modules on the path, and programs that compile in half the time."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """XLA's expensive passes off: what is compared is the mathematics."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
