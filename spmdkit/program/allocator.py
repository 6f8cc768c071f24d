"""Settings of the C library's allocator for runs on CPU devices: each step reuses the memory block of the previous
step's temporaries.

XLA:CPU allocates the temporaries of a step in blocks (at most 32 MiB each, see compiler.py) and frees them at the end.
glibc maps blocks of this size again each time, or returns them: 65,000 page faults per step for 260 MiB, a third of the
step time (docs/benchmarks.md). Four `mallopt` settings keep the blocks in the heap. No mapping, no trimming and the
padding, which keeps the heaps of threads, are set after the step is compiled; otherwise the compiler's memory would
stay allocated too. Each arena can retain the blocks of a step, so there are at most four; this is set before a run
joins, since later threads would have their own. With a single arena the threads wait for each other.

Only `train` and `bench communication` apply them, for the lifetime of the process. SPMDKIT_ALLOCATOR=system disables
them, and so does any allocator setting of the C library in the environment.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import fake_devices
from spmdkit.foundation.formatting import nearest

SWITCH = "SPMDKIT_ALLOCATOR"
CHOICES = ("keep", "system")

ARENAS = 4
HEAP_BYTES = 64 << 20
"""The size of a heap of a thread (HEAP_MAX_SIZE in glibc's malloc/arena.c). A larger block is mapped."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # malloc.h
_ACCELERATORS = ("nvidia0", "kfd", "accel0", "vfio/0")
"""Device files of GPUs and TPUs, under /dev."""


def limit_arenas(devices: str | Sequence[int], environ: Mapping[str, str]) -> bool:
    """Limits the arenas of later threads if the config's `devices` are CPU devices; returns whether it did.

    Raises:
        ConfigError: SPMDKIT_ALLOCATOR has an unknown value.
    """
    return _requested(environ) and _on_cpu(devices, environ) and glibc() is not None and _set(_ARENA_MAX, ARENAS)


def disable_trimming() -> bool:
    """Trims the heaps now and disables trimming; returns whether the allocator accepted it. Call `limit_arenas`
    first."""
    accepted = _set(_MMAP_MAX, 0) and _set(_TRIM_THRESHOLD, -1) and _set(_TOP_PAD, HEAP_BYTES)
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    return accepted


def glibc() -> str | None:
    """Returns the glibc version of this process, or None for any other C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        return None
    return version if name == "glibc" else None


def describe(environ: Mapping[str, str]) -> str:
    """Returns a one-line description of the allocator settings of `train` on CPU devices.

    Raises:
        ConfigError: SPMDKIT_ALLOCATOR has an unknown value.
    """
    version = glibc()
    if version is None:
        return "not glibc: unchanged"
    if _requested(environ):
        return f"glibc {version}, train on CPU reuses a step's memory for the next ({SWITCH}=system disables this)"
    why = f"{SWITCH}=system" if SWITCH in environ else f"{_own_setting(environ)} is set"
    return f"glibc {version}, unchanged ({why})"


def _requested(environ: Mapping[str, str]) -> bool:
    choice = environ.get(SWITCH)
    if choice is None:
        return _own_setting(environ) is None
    if choice not in CHOICES:
        raise ConfigError(
            f"{SWITCH} is {choice!r}.{nearest(choice, CHOICES)} It is one of {', '.join(CHOICES)}. Set "
            f"{SWITCH}=system to use the system allocator unchanged."
        )
    return choice == "keep"


def _own_setting(environ: Mapping[str, str]) -> str | None:
    """Returns the environment variable that configures glibc's allocator (mallopt(3)), or None."""
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return "GLIBC_TUNABLES"
    return next((name for name in environ if name.startswith("MALLOC_")), None)


def _on_cpu(devices: str | Sequence[int], environ: Mapping[str, str]) -> bool:
    """Returns whether a config's devices are CPU devices; for `auto`, this is a guess until JAX is initialized."""
    if isinstance(devices, str) and fake_devices(devices):
        return True
    if platforms := environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not any((Path("/dev") / name).exists() for name in _ACCELERATORS)


def _set(parameter: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).mallopt(parameter, value) == 1)
