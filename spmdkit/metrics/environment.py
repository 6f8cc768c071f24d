"""The environment of a run: versions, devices, git commit, and the environment variables that change the result.

No secrets are recorded: variables outside a list are not read, and apparent credentials become `***`.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from spmdkit.foundation import redact
from spmdkit.foundation.constants import OUR_VARIABLES
from spmdkit.foundation.timeouts import GIT_S

NUMERIC = re.compile(
    r"JAX_(ENABLE_X64|DEFAULT_MATMUL_PRECISION|DEFAULT_PRNG_IMPL|DEFAULT_DTYPE_BITS|THREEFRY_PARTITIONABLE|NUMPY_(DTYPE|RANK)_PROMOTION"
    r"|RANDOM_SEED_OFFSET|DISABLE_JIT|DISABLE_MOST_OPTIMIZATIONS|OPTIMIZATION_LEVEL|EXEC_TIME_OPTIMIZATION_EFFORT|USE_SHARDY_PARTITIONER"
    r"|ENABLE_CUSTOM_PRNG|SOFTMAX_CUSTOM_JVP|CPU_\w+)"
    r"|XLA_FLAGS|LIBTPU_INIT_ARGS|NVIDIA_TF32_OVERRIDE|TF_CUDNN_\w+|TF32_\w+|CUBLAS_WORKSPACE_CONFIG|NCCL_(ALGO|PROTO|NVLS_ENABLE)"
)
"""Variables that can change the numbers of a run; the only such list. All processes must have equal values."""
FLAGS_WITHOUT_NUMBERS = re.compile(
    r"--(?:\w+_)?(?:dump|dumping|logs?|logging|print|trace|traceme|debug|verbose|verbosity|timeout|time_out|deadline)(?:_\w+)?"
    r"|--\w+_(?:device_count|cache_dir|data_dir|hlo_profile)|--(?:v|vmodule|minloglevel|logtostderr|alsologtostderr|stderrthreshold)"
)
"""Flags of XLA_FLAGS and LIBTPU_INIT_ARGS that change no number, matched by complete words: output, its location, and
timeouts.

Variables that select kernels (`xla_gpu_load_autotune_results_from`, `..._algorithm_denylist_path`) do change numbers.
"""

PACKAGES = ("spmdkit", "jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "grain", "numpy")
_ALLOWED = re.compile(r"JAX_.*|XLA_FLAGS|SPMDKIT_.*")
NAMED = {*OUR_VARIABLES, *(f"JAX_{name}" for name in ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS"))}
NAMED |= {"JAX_PLATFORM_NAME", "JAX_LOCAL_DEVICE_IDS"}
"""Variables recorded with values, in addition to XLA_FLAGS and all settings of JAX."""


def environment(
    folder: str | os.PathLike[str] | None = None,
    *,
    devices: Iterable[Any] | None = None,
    num_processes: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the content of `environment.json` as plain JSON values.

    `folder`: the config's folder; its git commit is recorded. `devices`: the run's `jax.Device`s (default: all JAX
    devices, which starts JAX's backend: call it after the cluster has been joined). `num_processes`: likewise.
    """
    if devices is None or num_processes is None:
        import jax

        devices = jax.devices() if devices is None else devices
        num_processes = jax.process_count() if num_processes is None else num_processes
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": package_versions(),
        "devices": device_groups(devices),
        "num_processes": num_processes,
        "git": git_state(folder) if folder is not None else None,
        "variables": variables(os.environ if environ is None else environ),
        "executable": os.path.basename(sys.executable),
    }


@functools.cache
def package_versions() -> dict[str, str | None]:
    """Returns the installed version of each of `PACKAGES`; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def numeric_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the non-empty variables of `NUMERIC`, with sorted flags and without flags that change no number."""
    values = {name: environ[name].strip() for name in sorted(environ) if NUMERIC.fullmatch(name)}
    for name in {"XLA_FLAGS", "LIBTPU_INIT_ARGS"} & values.keys():
        flags = sorted(flag for flag in values[name].split() if not FLAGS_WITHOUT_NUMBERS.fullmatch(flag.split("=")[0]))
        values[name] = " ".join(flags)
    return {name: redact.redact_value(value, name) for name, value in values.items() if value}


def device_groups(devices: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns `[{"platform", "kind", "count"}]`, one entry per kind of device, in the order of first occurrence."""
    counts = Counter((d.platform, d.device_kind) for d in devices)
    return [{"platform": p, "kind": kind, "count": count} for (p, kind), count in counts.items()]


def git_state(folder: str | os.PathLike[str], timeout_s: float = GIT_S) -> dict[str, Any] | None:
    """Returns `{"commit", "dirty"}` of the repository around `folder`, or None without git, repository or commit.

    `dirty`: tracked files differ from the commit (untracked files do not count); None if git timed out.
    """
    commit = _git(folder, timeout_s, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _git(folder, timeout_s, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: str | os.PathLike[str], timeout_s: float, *arguments: str) -> str | None:
    # GIT_DIR and similar variables select another repository; the lock interferes with the user's git; fsmonitor is a
    # program that the repository configures.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", os.fspath(folder), *arguments]
    try:
        result = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace").strip() if result.returncode == 0 else None


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change the behavior of JAX or spmdkit, without credentials.

    Unknown variables with the same prefixes are recorded by name only: `JAX_HEADER` may contain anything.
    """
    shown = {name: environ[name] for name in sorted(environ) if _ALLOWED.fullmatch(name)}
    return {key: redact.redact_value(value, key) if _is_known(key) else redact.HIDDEN for key, value in shown.items()}


def _is_known(name: str) -> bool:
    if name == "XLA_FLAGS" or name in NAMED:
        return True
    import jax

    return name.lower() in jax.config.values
