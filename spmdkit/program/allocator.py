"""Settings of the C library's allocator for runs on CPU devices: each step reuses the memory block of the previous
step's temporaries.

XLA:CPU allocates all temporaries of a step as one block and frees it at the end. glibc maps a block above 32 MiB again
each time: 65,000 page faults per step for 260 MiB, a third of the step time (docs/benchmarks.md). No mapping and no
trimming keep the block in the heap. They are set after the step is compiled; otherwise the compiler's memory would stay
allocated too. A heap of a thread holds at most 64 MiB, so with one device all threads share one arena; this is set
before a run joins, since later threads would have their own. With several devices in a process, one arena costs more
than it saves, since the threads of all devices wait for it: there are two for each device.

Blocks of 32 MiB (`xla_multiheap_size_constraint_per_heap`) in four arenas would save another 0.15 of the step, but
jaxlib 0.10.2 cannot write such a program to the compile cache ("Multiple temp buffer allocations found").

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

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # malloc.h
_ACCELERATORS = ("nvidia0", "kfd", "accel0", "vfio/0")
"""Device files of GPUs and TPUs, under /dev."""


def limit_arenas(devices: str | Sequence[int], environ: Mapping[str, str], num_processes: int = 1) -> bool:
    """Limits the arenas of later threads if the config's `devices` are CPU devices; returns whether it did.

    Raises:
        ConfigError: SPMDKIT_ALLOCATOR has an unknown value.
    """
    if not (_requested(environ) and _on_cpu(devices, environ) and glibc() is not None):
        return False
    total = fake_devices(devices) if isinstance(devices, str) else len(devices)
    per_process = -(-(total or 1) // num_processes)
    return _set(_ARENA_MAX, 1 if per_process == 1 else 2 * per_process)


def disable_trimming() -> bool:
    """Trims the heap now and disables trimming; returns whether the allocator accepted it. Call `limit_arenas`
    first."""
    accepted = _set(_MMAP_MAX, 0) and _set(_TRIM_THRESHOLD, -1)
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
