"""One compile cache per test session: half of the programs of the suite have been compiled by an earlier test.

The folder is temporary. The process that reports makes it and removes it, the workers of pytest-xdist share it. JAX
writes an entry in place (0.10.2), where another worker could read half of it; here an entry is renamed when it is
whole.
"""

import os
import secrets
import tempfile
from pathlib import Path

import jax
from jax._src import compilation_cache, lru_cache

FOLDER = "SPMDKIT_TEST_COMPILE_CACHE"
"""The variable that gives the folder to the workers."""

_SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


class _WholeEntries(lru_cache.LRUCache):
    def put(self, key: str, value: bytes) -> None:
        partial = self.path / f"{secrets.token_hex(8)}.partial"
        partial.write_bytes(value)
        os.replace(partial, self.path / f"{key}-cache")


class CompileCache:
    """A pytest plugin: makes the folder, has JAX use it, removes it."""

    def __init__(self) -> None:
        self._made = None if FOLDER in os.environ else tempfile.TemporaryDirectory(prefix="spmdkit-tests-")
        if self._made is not None:
            os.environ[FOLDER] = self._made.name
        compilation_cache.get_file_cache = lambda path: (_WholeEntries(path, max_size=-1), path)
        for name, value in _SETTINGS.items():
            jax.config.update(name, value)

    def pytest_unconfigure(self) -> None:
        if self._made is not None:
            os.environ.pop(FOLDER)
            self._made.cleanup()


def use(is_used: bool) -> None:
    """Turns the cache on or off from here on."""
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(Path(os.environ[FOLDER])) if is_used else None)
