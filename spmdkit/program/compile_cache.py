"""The persistent compile cache: stores compiled programs on the machine's disk, so that a restart does not compile them
again.

JAX's persistent cache (`jax_compilation_cache_dir`) is off by default. A cache that is on by default must be private,
since its entries are executed; atomic, since runs are killed; and correct on machines of another kind, since home
directories are shared. `train` and `eval` therefore pass JAX another store while they run:

- the folder is accessible only by its owner (0700), under ~/.cache/spmdkit/compile. Any other folder is not used, and a
  note is logged;
- it has one folder per *kind of machine* (`machine`). XLA:CPU checks CPU features on load but continues if they differ:
  SIGILL (openxla/xla#44565, uwplasma/vmex#142);
- an entry is written to a temporary file and renamed; it begins with a digest, and a damaged entry is removed;
- every process writes, while in JAX only process 0 does: on CPU each process has different keys;
- the least recently used entries are removed when the folder exceeds `max_bytes`.

The rest of the key is JAX's: the program with its source lines, compiler options, XLA_FLAGS, devices. Programs with
host callbacks are not cached. `plan` and `verify` always compile: the compiler prints its warnings only then.
Source: docs.jax.dev/en/latest/persistent_compilation_cache.html; jax/_src/lru_cache.py, compiler.py (0.10.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import secrets
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from spmdkit.compat import cache as compat_cache
from spmdkit.foundation.constants import COMPILE_CACHE
from spmdkit.foundation.files import user_cache

FILE_MODE, FOLDER_MODE = 0o600, 0o700
SUFFIX = ".executable"
_DIGEST_BYTES = 32
JAX_SETTINGS = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
"""JAX's cache variables; if one is set, JAX's settings are used."""


class Executables:
    """Compiled programs by key, in one folder: implements JAX's cache interface, and records hits and misses.

    Attributes:
        found, missed: names of the requested programs that were in the cache, and that were not.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._path = self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.found: list[str] = []
        self.missed: list[str] = []

    def get(self, key: str) -> bytes | None:
        """Returns the cached value of a key; None if it is missing or damaged."""
        path = self._file(key)
        value = None
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            if content[:_DIGEST_BYTES] == _digest(key, content[_DIGEST_BYTES:]):
                value = content[_DIGEST_BYTES:]
                os.utime(path)  # marks the entry as recently used
            else:
                path.unlink(missing_ok=True)
        name = key.rpartition("-")[0].removeprefix("jit_")[:80]  # `train_step` of `jit_train_step-6936e5...`
        (self.missed if value is None else self.found).append(name)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Stores a value. A failed write is ignored, since a cache must not fail a run."""
        path = self._file(key)
        temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
        with self._lock, contextlib.suppress(OSError):
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_digest(key, value))
                    file.write(value)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            self._evict()

    def _evict(self) -> None:
        """Removes partial files and the least recently used entries until the total size fits `max_bytes`."""
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # other processes remove entries concurrently
                status = path.stat()
                if path.suffix in (SUFFIX, ".partial") and stat.S_ISREG(status.st_mode):
                    entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _file(self, key: str) -> Path:
        return self.folder / f"{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}{SUFFIX}"


def _digest(key: str, value: bytes) -> bytes:
    return hashlib.blake2b(value, key=hashlib.blake2b(key.encode()).digest()[:64], digest_size=_DIGEST_BYTES).digest()


def cache_folder(folder: str | Path | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Returns (the folder for this kind of machine, its description), or (None, the reason). `folder`: the config's
    parent folder; None: the environment's, or a folder under the user's cache folder."""
    setting = environ.get(COMPILE_CACHE, "")
    if setting in ("0", "off"):
        return None, f"off ({COMPILE_CACHE}={setting})"
    if decided := [name for name in JAX_SETTINGS if environ.get(name)]:
        return None, f"JAX's own, as {decided[0]} says"
    parent = Path(folder or setting or user_cache(environ) / "compile")
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        if why := not_private(parent):
            return None, f"off: {parent} {why}. Make it private (chmod 700), or name another in compile_cache.directory"
        machine_folder = parent / machine()
        machine_folder.mkdir(exist_ok=True, mode=FOLDER_MODE)
        if why := not_private(machine_folder):
            return None, f"off: {machine_folder} {why}. Remove it"
    except (OSError, RuntimeError, ValueError) as error:
        return None, f"off: {parent} cannot be created ({error}). Name another folder in compile_cache.directory"
    return machine_folder, str(machine_folder)


def not_private(folder: Path) -> str:
    """Returns why the contents of a folder cannot be trusted, or an empty text."""
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def machine() -> str:
    """Returns a short hash of everything on this machine, apart from the program, that affects compiled code."""
    facts = [
        f"jax {jax.__version__} jaxlib {jaxlib.version.__version__}",
        _size_of_jaxlib(),
        f"{sys.platform} {platform.machine()} {sys.maxsize}",
        _cpu(),
        f"{os.cpu_count()} cores, {os.environ.get('NPROC', '')} threads",
    ]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=10).hexdigest()


def _size_of_jaxlib() -> str:
    """Returns the file sizes of jaxlib's libraries, which identify a rebuilt version."""
    return ",".join(str(path.stat().st_size) for path in sorted(Path(jaxlib.__file__).parent.glob("*.so*")))


def _cpu() -> str:
    """Returns the model and features of the CPU; without /proc, the name that Python reports."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        values = dict(line.partition(":")[::2] for line in lines)
        wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
        return "; ".join(value for name, value in values.items() if name.strip() in wanted)
    return platform.processor()


@dataclasses.dataclass(frozen=True)
class Programs:
    """The cache of a run.

    Attributes:
        store: the store of compiled programs; None if there is no cache.
        description: the folder of the cache, or why there is none.
        is_refused: a cache is configured, but its folder cannot be used.
    """

    store: Executables | None
    description: str
    is_refused: bool = False

    def programs(self) -> dict[str, Any]:
        """Returns the event fields with the programs loaded from the cache and those compiled so far."""
        found = {} if self.store is None else {"from_cache": [*self.store.found], "compiled": [*self.store.missed]}
        return {"cache": self.description, **found}


@contextlib.contextmanager
def enable_cache(options: Any, base: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Programs]:
    """Context in which JAX caches compiled programs as set by the config's `compile_cache`. `base`: config folder."""
    if options is None:
        yield Programs(None, "off: compile_cache is null")
        return
    folder, status = cache_folder(base / options.directory if options.directory else None, environ)
    if folder is not None and compat_cache.has_compilation_cache():
        folder, status = None, "JAX's own, as configured"
    if folder is None:
        yield Programs(None, status, is_refused=status.startswith("off: "))
        return
    store = Executables(folder, options.max_bytes)
    with compat_cache.compilation_cache(store, str(folder), options.min_s):
        yield Programs(store, status)
