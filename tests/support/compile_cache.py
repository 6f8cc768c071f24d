"""One compile cache per test session: half of the suite's programs are compiled by an earlier test.

The folder is temporary. The reporting process creates and removes it, and the workers of pytest-xdist share it. JAX
writes an entry in place (0.10.2), so another worker could read a partial one. Here an entry is renamed once complete.

JAX writes the entries of process 0 only, under keys that contain the devices. Here every process writes, under keys
without devices, and a process waits for another one that compiles the same program: the ranks of a job need it at the
same time.
"""

import contextlib
import fcntl
import functools
import os
import secrets
import tempfile
import time
import types
import zlib
from pathlib import Path
from typing import Any

import jax
from jax._src import cache_key, compilation_cache, compiler, lru_cache
from jax._src.interpreters import mlir

FOLDER = "SPMDKIT_TEST_COMPILE_CACHE"
"""The environment variable that passes the folder to the workers."""

_SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}

LONGEST_WAIT_S = 10.0
"""A test may stop the process that compiles."""

_LOCKS: dict[str, int] = {}
"""Key -> the descriptor of the lock that this process holds while it compiles. A killed process holds none."""


class _WholeEntries(lru_cache.LRUCache):
    def put(self, key: str, value: bytes) -> None:
        partial = self.path / f"{secrets.token_hex(8)}.partial"
        partial.write_bytes(value)
        os.replace(partial, self.path / f"{key}-cache")


class _SharedEntries(_WholeEntries):
    def get(self, key: str) -> bytes | None:
        """Returns an entry once a process that compiles it has written it. None: this process compiles it."""
        if (found := super().get(key)) is not None:
            return found
        lock, deadline = os.open(self.path / f"{key}.lock", os.O_CREAT | os.O_RDWR), time.monotonic() + LONGEST_WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.002)
        found = super().get(key)
        if found is None:
            _LOCKS[key] = lock
        else:
            os.close(lock)
        return found


def _is_used() -> bool:
    """Whether JAX uses the folder of the session, and not the cache of a run."""
    return jax.config.jax_compilation_cache_dir == os.environ.get(FOLDER)


def _compile_once() -> type[_WholeEntries]:
    """Makes each program be compiled by one process, and returns the class of the cache. Of JAX 0.10.2."""
    write, compile_and_write = compiler._cache_write, compiler._compile_and_write_cache
    hash_options, hash_topology = cache_key._hash_serialized_compile_options, cache_key._hash_accelerator_config

    def write_in_each(cache_key, compile_time_secs, module_name, backend, executable, host_callbacks):
        if not _is_used():
            write(cache_key, compile_time_secs, module_name, backend, executable, host_callbacks)
        elif not host_callbacks:
            with contextlib.suppress(OSError, jax.errors.JaxRuntimeError):  # the session may have ended
                compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, 0)

    def compile_and_unlock(*args: Any) -> Any:
        try:
            return compile_and_write(*args)
        finally:
            if (lock := _LOCKS.pop(args[-1], None)) is not None:
                os.close(lock)

    def hash_without_devices(to: Any, options: Any, strip_device_assignment: bool) -> None:
        hash_options(to, options, strip_device_assignment or _is_used())

    def hash_kinds(to: Any, devices: Any) -> None:
        is_shared = _is_used() and devices.flat[0].platform == "cpu"
        (cache_key._hash_devices if is_shared else hash_topology)(to, devices)

    compiler._cache_write, compiler._compile_and_write_cache = write_in_each, compile_and_unlock
    cache_key._hash_serialized_compile_options = hash_without_devices
    cache_key._hash_accelerator_config = hash_kinds
    return _SharedEntries


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
        entries = _compile_once() if jax.__version__.startswith("0.10.") else _WholeEntries
        compilation_cache.get_file_cache = lambda path: (entries(path, max_size=-1), path)
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
