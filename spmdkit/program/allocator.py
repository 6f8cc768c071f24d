"""The C library's allocator while a run trains on CPU devices: the block of a step's temporaries is kept for the next
step.

XLA:CPU asks for all temporaries of a step as one block and gives it back at the end. glibc maps a block above 32 MiB
anew each time: 65,000 page faults a step for 260 MiB, a third of its time (docs/benchmarks.md). Three settings of
`mallopt` keep the block in the heap, and none does it alone. One arena: a thread with an arena of its own cannot hold
so large a block in it and maps it, whatever the others say; this counts only before threads have theirs, so it is set
before a run joins. No mapping, and no giving back at the top of the heap: set once the step is compiled, or what
compiling needed would stay as well.

Never at import, and in no command but `train` and `bench communication`, which times what `train` does. It stays for
the life of the process. SPMDKIT_ALLOCATOR=system leaves the allocator alone, and so does any setting of it that the
environment has for the C library itself. Other C libraries (musl, macOS) are left alone.
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
_VARIABLES = (
    "MALLOC_ARENA_MAX",
    "MALLOC_ARENA_TEST",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""By which glibc itself is told (mallopt(3))."""
_ACCELERATORS = ("nvidia0", "kfd", "accel0", "vfio/0")
"""Device files of GPUs and TPUs, below /dev."""


def one_arena(devices: str | Sequence[int], environ: Mapping[str, str]) -> bool:
    """Lets all threads that come share one arena, where `devices` of a config mean CPU devices; returns whether it did.

    Raises:
        ConfigError: SPMDKIT_ALLOCATOR has a value that is not known.
    """
    if not _asked(environ) or not _on_cpu(devices, environ) or glibc() is None:
        return False
    return _set(_ARENA_MAX, 1)


def keep_memory() -> bool:
    """Gives back what is free now, and from here on nothing; returns whether the allocator took it. After `one_arena`
    only."""
    taken = _set(_MMAP_MAX, 0) and _set(_TRIM_THRESHOLD, -1)
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    return taken


def glibc() -> str | None:
    """Returns the version of glibc that this process runs on, None on any other C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        return None
    return version if name == "glibc" else None


def describe(environ: Mapping[str, str]) -> str:
    """Returns what `train` on CPU devices does with the allocator, in one line.

    Raises:
        ConfigError: SPMDKIT_ALLOCATOR has a value that is not known.
    """
    version = glibc()
    if version is None:
        return "not glibc: left alone"
    if _asked(environ):
        return f"glibc {version}, train on CPU keeps a step's memory for the next ({SWITCH}=system: not)"
    why = f"{SWITCH}=system" if SWITCH in environ else f"{_own_setting(environ)} is set"
    return f"glibc {version}, left alone ({why})"


def _asked(environ: Mapping[str, str]) -> bool:
    choice = environ.get(SWITCH)
    if choice is None:
        return _own_setting(environ) is None
    if choice not in CHOICES:
        raise ConfigError(
            f"{SWITCH} is {choice!r}.{nearest(choice, CHOICES)} It is one of {', '.join(CHOICES)}. Set {SWITCH}=system to leave the "
            "allocator alone."
        )
    return choice == "keep"


def _own_setting(environ: Mapping[str, str]) -> str | None:
    """Returns the variable by which the environment sets glibc's allocator, or None."""
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return "GLIBC_TUNABLES"
    return next((name for name in _VARIABLES if name in environ), None)


def _on_cpu(devices: str | Sequence[int], environ: Mapping[str, str]) -> bool:
    """Returns whether a config's devices are CPU devices, which is not certain for `auto` before JAX has looked."""
    if isinstance(devices, str) and fake_devices(devices):
        return True
    if platforms := environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not any((Path("/dev") / name).exists() for name in _ACCELERATORS)


def _set(parameter: int, value: int) -> bool:
    return ctypes.CDLL(None).mallopt(parameter, value) == 1
