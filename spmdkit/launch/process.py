"""Child processes: start them so that they die with this one, read how they ended, send signals.

The kernel kills a child when its parent dies, even by `kill -9` (PR_SET_PDEATHSIG, Linux). The signal comes when the
*thread* that started the child ends, so a lasting thread starts it. Python code between fork and exec (`preexec_fn`)
can deadlock where JAX's threads run, so a small Python program calls the kernel and then becomes the command (20 ms).
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG = 1
XLA_POOL = "tf_"
"""Begins the names of the threads in which XLA computes on CPU (jaxlib 0.10.2)."""

_BECOME = f"""
import _signal
_signal.signal(_signal.SIGINT, _signal.SIG_DFL)
import ctypes, os, sys
if sys.argv[3:5] == ["-m", "spmdkit"]:
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit({128 + signal.SIGKILL})
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{{sys.argv[2]}}: {{error.strerror}}")
"""
"""Makes the request to the kernel, checks whether the parent died in between, and becomes the command; -I -S: nothing
else of Python is loaded. A Ctrl-C meanwhile ends it without a traceback; a command of ours takes it as soon as it can
(spmdkit/__main__.py)."""

_lasting_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="spmdkit-start")
"""Starts children for threads that may end before them."""


def start(command: list[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that dies with this one; `options` are those of `subprocess.Popen`."""
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]
    given = None if env is None else dict(env)
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, env=given, **options)
    return _lasting_thread.submit(lambda: subprocess.Popen(command, env=given, **options)).result()


def say(line: str) -> None:
    """Prints a line of the launcher."""
    print(line, file=sys.stderr, flush=True)


def exit_status(pid: int) -> int | None:
    """Returns the exit status (negative for a signal), or None while it runs. The dead stay zombies, so that the number
    of their group is not reused before the group is killed."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped (SIGSTOP, a debugger), which is no fault; True also where that cannot
    be seen."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return True


def busy_ns(pid: int) -> int | None:
    """Returns for how many nanoseconds the main thread of a process and XLA's pools of threads have run, None where
    that cannot be seen. All others use up to 10 % of a core together."""
    total = 0
    try:
        for thread in os.scandir(f"/proc/{pid}/task"):
            with open(f"{thread.path}/comm") as name, open(f"{thread.path}/schedstat") as ran:
                if thread.name == str(pid) or name.read().startswith(XLA_POOL):
                    total += int(ran.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return total


def send(pid: int, number: int) -> None:
    """Sends a signal to the leader of a session; KILL goes to its whole group, so that its own children go too."""
    if pid <= 1:  # the group 1 means every process of the machine to the kernel
        raise ValueError(f"process {pid} is none that we have started")
    with suppress(ProcessLookupError):  # it ended in this moment
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)
