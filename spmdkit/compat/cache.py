"""Private parts of JAX's persistent compile cache (jax 0.10.2 to 0.12): the cache object, and the processes that write
to it."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import jax


def has_compilation_cache() -> bool:
    """Returns whether JAX already has a cache, or its caches are disabled."""
    config: Any = jax.config
    return bool(config.jax_compilation_cache_dir) or not config.jax_enable_compilation_cache


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Context in which JAX compiles and reads no cache. A CPU executable from a cache cannot be serialized: another
    process finds no kernels in it (`Function add_kernel not found`, jax 0.10.2)."""
    from jax._src import compilation_cache

    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def compilation_cache(store: Any, path: str, min_s: float) -> Iterator[None]:
    """Context in which JAX stores programs that took `min_s` or longer to compile in `store` (`get(key)`, `put(key,
    bytes)`), in every process. `path` is a separate folder for XLA's autotuning cache."""
    from jax._src import compilation_cache, compiler

    config: Any = jax.config
    wanted = {
        "jax_compilation_cache_dir": path,
        "jax_persistent_cache_min_compile_time_secs": min_s,
        "jax_compilation_cache_include_metadata_in_key": True,
    }
    before = {name: getattr(config, name) for name in wanted}
    opened, written = compilation_cache.get_file_cache, compiler._cache_write
    compilation_cache.reset_cache()
    for name, value in wanted.items():
        config.update(name, value)
    compilation_cache.get_file_cache = lambda path: (store, path)
    compiler._cache_write = _written_by_all(written)
    try:
        yield
    finally:
        compilation_cache.get_file_cache, compiler._cache_write = opened, written
        for name, value in before.items():
            config.update(name, value)
        compilation_cache.reset_cache()


def _written_by_all(original: Any) -> Any:
    """Returns `_cache_write` of jax/_src/compiler.py without its condition that this is process 0. In jax 0.10 the last
    argument is the program's Python callbacks; programs with callbacks are not cached."""
    from jax._src import compilation_cache

    names = ("cache_key", "compile_time_secs", "module_name", "backend", "executable")
    signature = inspect.signature(original)
    if tuple(signature.parameters) not in (names, (*names, "host_callbacks")):
        return original  # unknown JAX version: only process 0 writes, as in JAX

    def write(*args: Any, **named: Any) -> None:
        key, seconds, module, backend, executable, *callbacks = signature.bind(*args, **named).args
        config: Any = jax.config
        if any(callbacks) or seconds < config.jax_persistent_cache_min_compile_time_secs:
            return
        try:
            compilation_cache.put_executable_and_time(key, module, executable, backend, int(seconds))
        except Exception as error:  # noqa: BLE001  a program that is not stored is compiled again
            warnings.warn(f"{module} is not stored in the compile cache: {type(error).__name__}: {error}", stacklevel=2)

    return write
