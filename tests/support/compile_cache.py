"""One compile cache per test session: half of the suite's programs are compiled by an earlier test.

The folder is temporary. The reporting process creates and removes it, and the workers of pytest-xdist share it. JAX
writes an entry in place (0.10.2), so another worker could read a partial one. Here an entry is renamed once complete.
"""

import functools
import os
import secrets
import tempfile
import types
import zlib
from pathlib import Path

import jax
from jax._src import compilation_cache, lru_cache
from jax._src.interpreters import mlir

FOLDER = "SPMDKIT_TEST_COMPILE_CACHE"
"""The environment variable that passes the folder to the workers."""

_SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


class _WholeEntries(lru_cache.LRUCache):
    def put(self, key: str, value: bytes) -> None:
        partial = self.path / f"{secrets.token_hex(8)}.partial"
        partial.write_bytes(value)
        os.replace(partial, self.path / f"{key}-cache")


def one_mlir_context() -> None:
    """Makes JAX (0.10.2) use one MLIR context in this process. It creates one for each program, which takes 5 ms."""
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)


_compress = functools.partial(zlib.compress, level=1)
"""A third of the time of the default, for entries that are a quarter larger."""


class CompileCache:
    """A pytest plugin that creates the folder, configures JAX to use it, and removes it."""

    def __init__(self) -> None:
        self._made = None if FOLDER in os.environ else tempfile.TemporaryDirectory(prefix="spmdkit-tests-")
        if self._made is not None:
            os.environ[FOLDER] = self._made.name
        one_mlir_context()
        compilation_cache.get_file_cache = lambda path: (_WholeEntries(path, max_size=-1), path)
        compilation_cache.zlib = types.SimpleNamespace(compress=_compress, decompress=zlib.decompress)
        for name, value in _SETTINGS.items():
            jax.config.update(name, value)

    def pytest_unconfigure(self) -> None:
        if self._made is not None:
            os.environ.pop(FOLDER)
            self._made.cleanup()


def use(is_used: bool) -> None:
    """Turns the cache on or off."""
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(Path(os.environ[FOLDER])) if is_used else None)
