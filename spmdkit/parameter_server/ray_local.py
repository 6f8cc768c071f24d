"""A private Ray for one run on this machine. It listens on the loopback interface, requires a token, and is stopped
when the run ends, even if the driver is killed.

- `address="local"`: a killed Ray leaves an address file. Any other start would try to join the dead cluster.
- Token: Ray requires one by default, and stores it in a file that all users of the machine can read. Here it is a file
  of the run with mode 0600.
- Start of processes: by default `ray.init` waits until one idle process per CPU has started. If one takes more than
  60 s, Ray kills it and `ray.init` never returns (github.com/ray-project/ray/issues/40131). Here processes start on
  demand, and have `RAY_REGISTER_S` to do so on a busy machine.
- Loopback: Ray replaces 127.0.0.1 by the host's address. The function that does this is disabled during the start, so
  GCS and raylet listen on 127.0.0.1.
- Shutdown: when the driver is killed, Ray's actors and raylet exit within 10 s, and two agents within 90 s. A small
  cleanup process (no JAX, no Ray) detects the driver's exit through a pipe, kills the processes with this run's mark in
  their environment, and removes the session's folder.

Measured with Ray 2.60 (2026-11-22).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.timeouts import RAY_REGISTER_S

MARK = "SPMDKIT_PARAMETER_SERVER"
TOKEN = secrets.token_hex(32)
"""One token for all runs of a process. Ray reads it once, at import, so its variables are set before."""
MIN_STORE, MAX_STORE = 128 * 2**20, 16 * 2**30
"""Size of the object store in bytes."""
SETTINGS = {"prestart_worker_first_driver": False, "worker_register_timeout_seconds": RAY_REGISTER_S}
"""Internal settings of Ray (ray_config_def.h)."""
ATTEMPTS = 3

GUARD = """
import os, shutil, signal, sys, time
mark, folder, token = (sys.argv[1] + "=" + sys.argv[2]).encode(), sys.argv[3], sys.argv[4]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while os.read(0, 1024):
    pass
def marked():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/" + pid + "/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    found.append(int(pid))
        except OSError:
            pass
    return found
driver, quiet, end = int(sys.argv[5]), 0, time.monotonic() + 60
while quiet < 3 and time.monotonic() < end:
    mine = [pid for pid in marked() if pid not in (os.getpid(), driver)]
    quiet = 0 if mine else quiet + 1
    for pid in mine:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.2)
shutil.rmtree(folder, ignore_errors=True)
try:
    os.unlink(token)
except OSError:
    pass
"""
"""Waits until its standard input closes, which means that the driver has exited, and cleans up. It kills only processes
with the mark of this run."""


class LocalRay:
    """Starts and stops a private Ray of `num` processes, each of which sends `num_bytes` concurrently. The token is in
    the run's `directory`. `log_to_driver`: also print the output of the actors in this process."""

    def __init__(self, directory: Path, num: int, num_bytes: int, log_to_driver: bool = False):
        self._log_to_driver = log_to_driver
        self._num, self._store = num, min(MAX_STORE, max(MIN_STORE, 4 * num * num_bytes))
        self._token, self._mark = directory / "ray.token", secrets.token_hex(16)
        self._before: dict[str, str | None] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def start(self) -> None:
        """Starts Ray and connects this process. Raises ConfigError if Ray does not start in `ATTEMPTS` attempts: on a
        busy machine one may exceed Ray's fixed limit of 30 s (ray/_private/node.py)."""
        for last in range(1, ATTEMPTS + 1):
            try:
                self._start()
                return
            except Exception as error:
                self.close()
                if last == ATTEMPTS:
                    raise ConfigError(
                        f"Ray did not start on this machine ({type(error).__name__}: {str(error)[:300]}). Look at its "
                        "load and at the memory of /dev/shm, or run without Ray: sync: parameter_server with "
                        "transport: threads, spmdkit launch without --on."
                    ) from error

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path must be short
        files.replace(self._token, TOKEN.encode(), mode=0o600)
        arguments = [MARK, self._mark, self._folder, str(self._token), str(os.getpid())]
        command = [sys.executable, "-I", "-S", "-c", GUARD, *arguments]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        variables = {
            MARK: self._mark,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        self._init()

    def _init(self) -> None:
        import ray
        from ray._private import services

        resolve: Any = services.resolve_ip_for_localhost
        services.resolve_ip_for_localhost = lambda host: host
        try:
            with warnings.catch_warnings():
                # Warnings of Python 3.12 and JAX, since Ray forks while JAX's threads run; only a few lines of Ray run
                # between fork and exec.
                warnings.simplefilter("ignore")
                ray.init(
                    address="local",
                    num_cpus=self._num,
                    include_dashboard=False,
                    object_store_memory=self._store,
                    log_to_driver=self._log_to_driver,
                    logging_level="ERROR",
                    _temp_dir=self._folder,
                    _node_ip_address="127.0.0.1",
                    _system_config=SETTINGS,
                )
        finally:
            services.resolve_ip_for_localhost = resolve

    def newest_error(self) -> str:
        """Returns the newest error of the raylet, which starts the processes; an empty string without one."""
        log = Path(self._folder, "session_latest", "logs", "raylet.out")
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return next((line.partition("] ")[2] for line in reversed(lines) if " E " in line.partition("]")[0]), "")

    def close(self) -> None:
        """Terminates all remaining processes. May be called twice."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(30)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
