"""Child processes: starts them so that they die with this one, reads their exit status, sends signals.

The kernel kills a child when its parent dies, even by `kill -9` (PR_SET_PDEATHSIG, Linux). It sends the signal when the
*thread* that started the child ends, so a permanent thread starts it. Python code between fork and exec (`preexec_fn`)
can deadlock while JAX's threads run, so a small Python program makes the system call and executes the command (20 ms).
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
OF_GROUP = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
XLA_POOL = "tf_"
"""Name prefix of the threads in which XLA computes on CPU (jaxlib 0.10.2)."""

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
"""Makes the system call, checks whether the parent died in the meantime, and executes the command; -I -S: loads nothing
else of Python. A Ctrl-C in the meantime ends it without a traceback; an spmdkit command handles Ctrl-C as early as
possible (spmdkit/__main__.py)."""

_lasting_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="spmdkit-start")
"""Starts children for threads that may end before them."""


def start(command: list[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that dies with this one; `options` are passed to `subprocess.Popen`."""
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]
    environment = None if env is None else dict(env)
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, env=environment, **options)
    return _lasting_thread.submit(lambda: subprocess.Popen(command, env=environment, **options)).result()


def print_line(line: str) -> None:
    """Prints a line of the launcher."""
    print(line, file=sys.stderr, flush=True)


def exit_status(pid: int) -> int | None:
    """Returns the exit status (negative for a signal), or None while it runs. A dead process stays a zombie, so that
    its group number is not reused before the group is killed."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped (SIGSTOP, a debugger), which is not a fault; True also if the state cannot
    be read."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return True


def busy_ns(pid: int) -> int | None:
    """Returns the CPU time of a process's main thread and XLA thread pools in nanoseconds, None if it cannot be read.
    All other threads together use up to 10 % of a core."""
    total = 0
    try:
        for thread in os.scandir(f"/proc/{pid}/task"):
            with open(f"{thread.path}/comm") as name, open(f"{thread.path}/schedstat") as ran:
                if thread.name == str(pid) or name.read().startswith(XLA_POOL):
                    total += int(ran.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return total


def virtual_bytes(pid: int) -> int:
    """Returns the size of a process's address space. Raises OSError."""
    with open(f"/proc/{pid}/statm") as sizes:
        return int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler of a signal; False if that cannot be read."""
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:")).split()[1]
            return bool(int(caught, 16) >> (number - 1) & 1)
    except (OSError, StopIteration):
        return False


def send(pid: int, number: int) -> None:
    """Sends a signal to the leader of a session. KILL, STOP and CONT are sent to its process group, so that its
    children die, stop and continue too."""
    if pid <= 1:  # for the kernel, group 1 means every process of the machine
        raise ValueError(f"process {pid} is none that we have started")
    with suppress(ProcessLookupError):  # it has just exited
        (os.killpg if number in OF_GROUP else os.kill)(pid, number)
