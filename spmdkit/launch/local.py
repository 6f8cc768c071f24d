"""`launch`: several processes of one command on this machine, as one: one output, one Ctrl-C, one exit code.

Each concern is a file: how a process is started and ends with us (process.py), how its output comes out (output.py), when the others must end
(supervise.py), who is to blame (cause.py). What is here is this machine's: addresses, environments, the last words. Hosts, schedulers and restarts are
other ways to start and other policies over the same parts.

Guarantees: no child outlives the launcher, not even a `kill -9` of it (Linux); when a process fails, all are gone about two seconds later; everything
listens on the loopback interface only; nothing is left on the disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdkit.errors import ConfigError, ExitCode
from spmdkit.keeper import Keeper, reserve_port
from spmdkit.launch.cause import Exit, cause, coded, ended_by
from spmdkit.launch.output import Output
from spmdkit.launch.process import start
from spmdkit.launch.supervise import Child, Note, Supervisor, end, queued_signals
from spmdkit.names import (
    BEAT_FILE,
    COORDINATOR,
    DEATHS_FILE,
    DEVICES_PER_PROCESS,
    ERROR_FILE,
    NUM_PROCESSES,
    PROCESS_ID,
    SERVICE,
    STEP_FILE,
)


def launch(
    command: list[str],
    num_processes: int,
    devices_per_process: int | None = None,
    env: Mapping[str, str] = os.environ,
    grace_s: float = 15.0,
) -> int:
    """Returns the exit code of `num_processes` copies of `command`: 0, or that of the first to fail.

    `grace_s` is how long processes may take to save and leave after SIGINT or SIGTERM came to the launcher. The second
    signal kills them. To be called from the main thread.
    """
    if num_processes < 1:
        raise ConfigError(f"launch -n {num_processes}: at least one process is needed. Try -n 2.")
    if devices_per_process is not None and devices_per_process < 1:
        raise ConfigError(f"--devices-per-process {devices_per_process}: at least one device. Try 1.")
    children: list[Child] = []
    with queued_signals() as signals:
        deaths = Note()
        held = [reserve_port() for _ in range(2)]
        coordinator, service = (f"127.0.0.1:{port}" for _, port in held)
        keeper = Keeper(num_processes, -1, start) if num_processes > 1 else None
        try:
            if keeper is not None:
                keeper.listen(service)
            for process in range(num_processes):
                errors, beats, step = notes = Note(), Note(), Note()
                child_env = child_environment(
                    env, coordinator, num_processes, process, devices_per_process, errors.path
                )
                child_env |= {BEAT_FILE: beats.path, STEP_FILE: step.path, DEATHS_FILE: deaths.path, SERVICE: service}
                popen = _start(command, child_env, pass_fds=[note.descriptor for note in (*notes, deaths)])
                children.append(Child(process, popen, *notes))
            lock = threading.Lock()
            for child in children:
                child.output = Output(child.process, child.popen, lock)
            asked = Supervisor(children, signals, grace_s, deaths).run()
        finally:
            end(children)
            if keeper is not None:
                keeper.kill()
            deaths.close()
            for holder, _ in held:
                holder.close()
    first = cause([child.exit for child in children if child.exit is not None])
    if first is None:
        return 0
    if first.ended_by_us and asked is not None:
        print(f"{num_processes} processes were killed after signal {asked}", file=sys.stderr, flush=True)
        return 128 + asked
    _explain(first, children[first.process])
    return first.code


def child_environment(
    env: Mapping[str, str],
    coordinator: str,
    num_processes: int,
    process: int,
    devices_per_process: int | None,
    error_file: Path | str,
) -> dict[str, str]:
    """Returns the environment of one process: the given one and its place in the cluster."""
    told = {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(process),
        ERROR_FILE: str(error_file),
        "PYTHONUNBUFFERED": "1",
    }
    if devices_per_process is not None:
        told[DEVICES_PER_PROCESS] = str(devices_per_process)
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in env):
        # gRPC would send even loopback through a proxy.
        others = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)]
        told["no_proxy"] = told["NO_PROXY"] = ",".join(["127.0.0.1", "localhost", *others[:1]])
    return {**env, **told}


def _start(command: list[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts one process in a session of its own: a Ctrl-C reaches only the launcher, and the group can be killed."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start(command, env, **pipes, pass_fds=pass_fds, start_new_session=True)


def _explain(first: Exit, child: Child) -> None:
    """Prints, as the last thing, what the process said that is to blame."""
    code = coded(first.code)
    if first.code == ExitCode.PREEMPTED:
        line = f"process {first.process} stopped on request with {code}"
    elif first.blamed and list(first.blamed) != [first.process]:
        at_fault = " and ".join(map(str, first.blamed))
        line = f"process {at_fault} is at fault, says process {first.process} ({code})"
    elif first.judged is not None:
        line = f"process {first.process} was ended by the launcher ({code})"
    elif first.status < 0:
        line = f"process {first.process} failed first: {ended_by(first)} ({code})"
    else:
        line = f"process {first.process} failed first with {code}"
    tail = child.output.tail if child.output is not None else ()
    said = first.message or ("" if first.code == ExitCode.PREEMPTED else "\n".join(tail))
    print(f"{line}{':' if said else ''}\n{said}".rstrip(), file=sys.stderr, flush=True)
