"""`launch`: several processes of one command on this machine, as one: one output, one Ctrl-C, one exit code.

Each concern is a file: how a process is started and ends with us (process.py), how its output comes out (output.py),
when the others must end (supervisor.py), who is to blame (root_cause.py), whether all are started again
(restart_policy.py), what is kept of their output (logs.py). What is here is this machine's: addresses, environments,
the last words. Hosts and schedulers are other ways to start and other policies over the same parts.

Guarantees: no child outlives the launcher, not even a `kill -9` of it (Linux); when a process fails, all are gone about
two seconds later; everything listens on the loopback interface only; nothing is left on the disk but the logs of a run,
in its own directory.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from spmdkit.cluster.service import ServiceProcess, reserve_port
from spmdkit.errors import ConfigError, ExitCode
from spmdkit.foundation import redact
from spmdkit.foundation.constants import (
    BEAT_FILE,
    COORDINATOR,
    DEATHS_FILE,
    DEVICES_PER_PROCESS,
    ERROR_FILE,
    NUM_PROCESSES,
    PROCESS_ID,
    SERVICE,
    STEP_FILE,
    is_step_name,
)
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.run_status import directory_of, newest_saved
from spmdkit.foundation.timeouts import LAUNCH_POLL_S
from spmdkit.launch import gpu_assignment
from spmdkit.launch.logs import Logs
from spmdkit.launch.membership import MembershipHistory, Resize, Wanted
from spmdkit.launch.observer import JobObserver
from spmdkit.launch.output import Output
from spmdkit.launch.precompile import Precompile
from spmdkit.launch.process import start
from spmdkit.launch.restart_policy import Restarts
from spmdkit.launch.root_cause import Exit, cause, coded, ended_by, lost
from spmdkit.launch.supervisor import Child, Note, Supervisor, end, queued_signals


@dataclass(frozen=True)
class Job:
    """What is started: `num_processes` copies of `command`; see `launch`."""

    command: list[str]
    num_processes: int
    devices_per_process: int | None
    env: Mapping[str, str]
    grace_s: float
    observer: JobObserver | None
    membership: tuple[Resize, Wanted] | None = None
    standby: int = 0
    precompile: Precompile | None = None


@dataclass
class Outcome:
    """How one start of all processes ended.

    Attributes:
        code: the exit code.
        stop_signal: the first signal that the launcher received meanwhile.
        newest: the newest step that the run has committed.
        before: the newest when the run reported its directory.
        lost: how many processes are gone as if their machine was.
        processes: how many there were at the end.
    """

    code: int = 0
    stop_signal: int | None = None
    newest: int | None = None
    before: int | None = None
    lost: int = 0
    processes: int = 0


def launch(
    command: list[str],
    num_processes: int,
    devices_per_process: int | None = None,
    env: Mapping[str, str] = os.environ,
    grace_s: float = 15.0,
    max_restarts: int = 0,
    observer: JobObserver | None = None,
    resize: Resize | None = None,
    wanted: Wanted | None = None,
    standby: int = 0,
    precompile: Precompile | None = None,
) -> int:
    """Returns the exit code of `num_processes` copies of `command`: 0, or that of the first to fail.

    Called from the main thread.

    Args:
        grace_s: seconds that processes have to save and exit after the launcher received SIGINT or SIGTERM. The second
            signal kills them.
        max_restarts: number of restarts of all processes after a failure (restart_policy.py). A launcher that received
            a stop signal starts nothing.
        observer: observes the job and may inject faults (tools/drill/); the output then goes to the logs only.
        resize: the number of processes of a restart (elastic.py).
        wanted: the number of processes that the job should have now; it continues without lost ones (membership.py).
        standby: number of standby processes that replace lost ones (standby.py).
        precompile: compiles ahead for other numbers of processes.

    Raises:
        ConfigError: a number is out of its range.
    """
    _check_numbers(num_processes, devices_per_process, grace_s, max_restarts)
    membership = None if resize is None or wanted is None else (resize, wanted)
    job = Job(command, num_processes, devices_per_process, env, grace_s, observer, membership, standby, precompile)
    redact.remember_command(command)  # what is kept of the processes' output is without them
    restarts = Restarts(max_restarts)
    with queued_signals() as signals:
        while True:
            attempt = _attempt(job, signals)
            wait_s = (
                None
                if attempt.stop_signal is not None
                else restarts.after(attempt.code, attempt.newest, attempt.before)
            )
            if wait_s is None:
                if restarts.why:
                    _say(f"not started again: {restarts.why}")
                return attempt.code
            if resize is not None:
                resized = _resized(job, command, resize, attempt)
                if resized is None:
                    return attempt.code
                job = resized
            newest = (
                "there is no checkpoint yet"
                if attempt.newest is None
                else f"the newest checkpoint is of step {attempt.newest}"
            )
            _say(
                f"starting all processes again in {wait_s:g} s: {newest}; {restarts.left} of {max_restarts} restarts "
                "are left"
            )
            if _asked_within(wait_s, signals):
                _say("not started again: the launcher received a signal to stop")
                return int(ExitCode.PREEMPTED)


def _check_numbers(num_processes: int, devices_per_process: int | None, grace_s: float, max_restarts: int) -> None:
    if num_processes < 1:
        raise ConfigError(f"launch -n {num_processes}: at least one process is needed. Try -n 2.")
    if devices_per_process is not None and devices_per_process < 1:
        raise ConfigError(f"--devices-per-process {devices_per_process}: at least one device. Try 1.")
    if not 0 <= grace_s < 86400:
        raise ConfigError(f"--grace-s {grace_s:g}: seconds, from 0 to less than a day. Try 60.")
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: a number of starts, at least 0. Try 3.")


def _resized(job: Job, command: list[str], resize: Resize, ended: Outcome) -> Job | None:
    """Returns the job as it is started again, None where no number of processes will do."""
    before = ended.processes
    found = resize(before, ended.lost)
    if found is None:
        _say(
            f"not started again: {ended.lost} of {before} processes are lost, and no smaller number that --elastic "
            "allows divides mesh and batch"
        )
        return None
    processes, more = found
    if processes != before:
        _say(
            f"{ended.lost} of {before} processes are lost; the next start has {processes}, with {' '.join(more)}: the "
            "same examples in each step"
        )
    return dataclasses.replace(job, num_processes=processes, command=[*command, *more])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _asked_within(seconds: float, signals: deque[int]) -> bool:
    """Waits, and returns whether the launcher received a stop signal meanwhile."""
    return Deadline(seconds).wait_for(lambda: bool(signals), LAUNCH_POLL_S)


def _attempt(job: Job, signals: deque[int]) -> Outcome:
    """Starts all processes, with ports and their own coordination service, and returns when all are gone."""
    children: list[Child] = []
    found, logs, deaths = Outcome(processes=job.num_processes), Logs(), Note()
    held = [reserve_port() for _ in range(2)]
    addresses = ("127.0.0.1", "127.0.0.1") if job.observer is None else job.observer.addresses
    coordinator, service = (f"{address}:{port}" for address, (_, port) in zip(addresses, held, strict=True))
    service_process = ServiceProcess(job.num_processes, -1, start) if job.num_processes > 1 else None
    starter = _Starter(job, logs, deaths, coordinator, service, children, _pinned(job))
    membership = None
    try:
        if service_process is not None:
            service_process.listen(service)
            if job.membership is not None:
                standby = 0 if starter.pinned[0] else job.standby  # its GPUs are not known before
                membership = MembershipHistory(
                    job.num_processes, *job.membership, starter.newcomer, service_process, standby, job.precompile
                )
        for process in range(job.num_processes):
            more: tuple[Mapping[str, str], list[int]] = ({}, []) if membership is None else membership.given(process)
            child = starter.start(process, *more)
            if membership is not None:
                membership.take(child)
        starter.shows_output()
        look = partial(_look, job, logs, children, found)
        supervisor = Supervisor(children, signals, job.grace_s, deaths, look)
        if membership is not None:
            supervisor.goes_on, supervisor.members = membership.goes_on, lambda: membership.running
            supervisor.each_turn = partial(_turn, look, membership, supervisor, starter)
        found.stop_signal = supervisor.run()
        look()
        if service_process is not None and membership is None and (status := service_process.ended()) is not None:
            _say(f"the process of the coordination service has ended with {status}, which ends all that use it")
    finally:
        end(children)
        logs.close()
        if service_process is not None:
            service_process.kill()
        if membership is not None:
            found.processes = len(membership.members)
            membership.close()
        deaths.close()
        for holder, _ in held:
            holder.close()
    found.newest = _newest(logs.folder)
    if job.observer is not None:
        job.observer.ended(children, found.stop_signal)
    _judge(found, job, children)
    return found


def _pinned(job: Job) -> list[dict[str, str]]:
    """Returns for each process the variables that assign its GPUs, and prints them."""
    seen = gpu_assignment.gpus(job.env)
    shown = [
        gpu_assignment.pinned(seen, job.num_processes, i, job.devices_per_process) for i in range(job.num_processes)
    ]
    if shown[0]:
        assigned = ", ".join(f"{own[gpu_assignment.VISIBLE]} for process {i}" for i, own in enumerate(shown))
        _say(f"{gpu_assignment.VISIBLE}: {assigned}")
    return shown


def _turn(look: Callable[[], None], membership: MembershipHistory, supervisor: Supervisor, starter: _Starter) -> None:
    look()
    if not membership.turn():
        supervisor.end_all()
    starter.shows_output()


def _judge(found: Outcome, job: Job, children: Sequence[Child]) -> None:
    """Says how the attempt ended, and why, as the last thing that is printed."""
    exits = [c.exit for c in children if c.exit is not None and not c.mourned and not c.in_waiting]
    first, found.lost = cause(exits), len(lost(exits))
    if first is None:
        return
    found.code = first.code
    if first.ended_by_us and found.stop_signal is not None:
        _say(f"{job.num_processes} processes were killed after signal {found.stop_signal}")
        found.code = 128 + found.stop_signal
    else:
        _explain(first, next(child for child in children if child.exit is first))


@dataclass
class _Starter:
    """Starts the processes of one attempt."""

    job: Job
    logs: Logs
    deaths: Note
    coordinator: str
    service: str
    children: list[Child]
    pinned: Sequence[Mapping[str, str]]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(
        self, process: int, variables: Mapping[str, str], descriptors: Sequence[int], more: Sequence[str] = ()
    ) -> Child:
        """Returns one process, started."""
        job = self.job
        errors, beats, step = notes = Note(), Note(), Note()
        env = child_environment(
            job.env, self.coordinator, job.num_processes, process, job.devices_per_process, errors.path
        )
        env |= {BEAT_FILE: beats.path, STEP_FILE: step.path, DEATHS_FILE: self.deaths.path, SERVICE: self.service}
        env |= {**(self.pinned[process] if 0 <= process < len(self.pinned) else {}), **variables}
        passed = [*descriptors, *(note.descriptor for note in (*notes, self.deaths))]
        if job.observer is not None:
            variables, opened = job.observer.given(process)
            env, passed = {**env, **variables}, [*passed, *opened]
        keys = tuple(f"{setting.partition('=')[0]}=" for setting in more)
        command = [word for word in job.command if not keys or not word.startswith(keys)]
        with nullcontext() if job.observer is None else job.observer.host(process):
            popen = _start([*command, *more], env, pass_fds=passed)
        child = Child(process, popen, *notes)
        self.children.append(child)
        return child

    def newcomer(
        self, process: int, variables: Mapping[str, str], descriptors: list[int], overrides: list[str]
    ) -> Child:
        """Returns a process that joins a later generation; a number below 0: a standby."""
        return self.start(process, variables, descriptors, overrides)

    def shows_output(self) -> None:
        """Lets what they print be read. After all of the first are started: a thread that reads holds up the start of
        the next."""
        for child in self.children:
            if child.output is None and not child.in_waiting:
                shown = self.job.observer is None
                child.output = Output(child.process, child.popen, self.lock, self.logs, shown=shown)


def _look(job: Job, logs: Logs, children: Sequence[Child], found: Outcome) -> None:
    """Moves logs to the run directory, once a process has reported it."""
    if job.observer is not None:
        job.observer.look(children)
    if logs.folder is None and (run_dir := directory_of(children[0].step.read())) is not None:
        logs.open(run_dir, len(children))
        found.before = _newest(logs.folder)


def _newest(folder: Path | None) -> int | None:
    """Returns the newest committed step of the run that has this folder of logs."""
    if folder is None:
        return None
    run_dir = folder.parents[1]
    if not (run_dir / "checkpoints").is_dir():  # in a bucket
        return newest_saved(run_dir)
    return max((int(p.name) for p in (run_dir / "checkpoints").glob("*") if is_step_name(p.name)), default=None)


def child_environment(
    env: Mapping[str, str],
    coordinator: str,
    num_processes: int,
    process: int,
    devices_per_process: int | None,
    error_file: Path | str,
) -> dict[str, str]:
    """Returns the environment of one process: the given one and its place in the cluster."""
    variables = {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(process),
        ERROR_FILE: str(error_file),
        "PYTHONUNBUFFERED": "1",
    }
    if devices_per_process is not None:
        variables[DEVICES_PER_PROCESS] = str(devices_per_process)
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in env):
        # gRPC would send even loopback through a proxy.
        others = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)]
        variables["no_proxy"] = variables["NO_PROXY"] = ",".join(["127.0.0.1", "localhost", *others[:1]])
    return {**env, **variables}


def _start(command: list[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts one process in its own session: a Ctrl-C reaches only the launcher, and the group can be killed."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start(command, env, **pipes, pass_fds=pass_fds, start_new_session=True)


def _explain(first: Exit, child: Child) -> None:
    """Prints last the message of the process at fault."""
    code = coded(first.code)
    if first.code == ExitCode.PREEMPTED:
        line = f"process {first.process} stopped on request with {code}"
    elif first.blamed and list(first.blamed) != [first.process]:
        at_fault = " and ".join(map(str, first.blamed))
        line = f"process {at_fault} is at fault, reports process {first.process} ({code})"
    elif first.judged is not None:
        line = f"process {first.process} was ended by the launcher ({code})"
    elif first.status < 0:
        line = f"process {first.process} failed first: {ended_by(first)} ({code})"
    else:
        line = f"process {first.process} failed first with {code}"
    tail = child.output.tail if child.output is not None else ()
    details = first.message or ("" if first.code == ExitCode.PREEMPTED else "\n".join(tail))
    print(f"{line}{':' if details else ''}\n{details}".rstrip(), file=sys.stderr, flush=True)
