"""`launch`: several processes of one command on this machine, with one output, one Ctrl-C and one exit code.

No child outlives the launcher, even after `kill -9` (Linux). After a failure all children exit within about two
seconds. Everything listens on the loopback interface only. Only the logs of a run remain on disk.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from spmdkit.cluster.service import ServiceProcess, bypass_proxies, reserve_port
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
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.run_status import directory_of, newest_saved
from spmdkit.foundation.timeouts import LAUNCH_POLL_S
from spmdkit.launch import gpu_assignment
from spmdkit.launch.logs import Logs
from spmdkit.launch.membership import Elasticity, MembershipHistory
from spmdkit.launch.output import Output
from spmdkit.launch.process import print_line, start
from spmdkit.launch.restart_policy import Restarts
from spmdkit.launch.root_cause import Exit, cause, describe_exit_code, describe_status, lost
from spmdkit.launch.supervisor import STOPPING, Child, ReportFile, Supervisor, end, queued_signals


class JobObserver(Protocol):
    """An observer of running processes: a drill, which injects faults. The launcher calls it in its main thread."""

    @property
    def addresses(self) -> tuple[str, str]:
        """The address at which process 0 listens, and the address of the launcher and its services."""
        ...

    def host(self, process: int) -> AbstractContextManager[None]:
        """Returns the context in which a process is started."""
        ...

    def process_env(self, process: int) -> tuple[Mapping[str, str], Sequence[int]]:
        """Returns additional environment variables and open descriptors of a process, for each attempt."""
        ...

    def on_service(self, pid: int) -> None:
        """Called for each attempt of several processes with the process of the coordination service."""
        ...

    def on_poll(self, children: Sequence[Child]) -> None:
        """Inspects the processes of an attempt, twenty times a second."""
        ...

    def on_exit(self, children: Sequence[Child], stop_signal: int | None) -> None:
        """Called when all processes of an attempt have exited, with the first signal that the launcher received."""
        ...


@dataclass(frozen=True)
class Job:
    """The job to start: `num_processes` copies of `command`; see `launch`."""

    command: list[str]
    num_processes: int
    devices_per_process: int | None
    env: Mapping[str, str]
    grace_s: float
    observer: JobObserver | None
    elasticity: Elasticity | None


@dataclass
class Outcome:
    """How one attempt ended."""

    code: int = 0
    stop_signal: int | None = None  # the first signal that the launcher received during the attempt
    newest: int | None = None  # the newest committed step of the run
    before: int | None = None  # the newest committed step when the run reported its directory
    lost: int = 0  # number of processes lost as in a machine failure
    processes: int = 0  # number of processes at the end


def launch(
    command: list[str],
    num_processes: int,
    devices_per_process: int | None = None,
    env: Mapping[str, str] = os.environ,
    grace_s: float = 15.0,
    max_restarts: int = 0,
    observer: JobObserver | None = None,
    elasticity: Elasticity | None = None,
) -> int:
    """Returns the exit code of `num_processes` copies of `command`: 0, or that of the first to fail.

    Called from the main thread.

    Args:
        grace_s: seconds for processes to save and exit after the launcher receives SIGINT or SIGTERM. A second signal
            kills them.
        max_restarts: number of restarts of all processes after a failure (restart_policy.py). After a stop signal the
            launcher starts nothing.
        observer: observes the job and may inject faults (tools/drill/); the output is then written to the logs only.
        elasticity: how the number of processes changes.

    Raises:
        ConfigError: a number is out of its range.
    """
    _check_numbers(num_processes, devices_per_process, grace_s, max_restarts)
    redact.register_command_secrets(command)  # stored output omits the secrets of the command line
    job = Job(command, num_processes, devices_per_process, env, grace_s, observer, elasticity)
    with queued_signals() as signals:
        return _run(job, signals, Restarts(max_restarts))


def _run(job: Job, signals: deque[int], restarts: Restarts) -> int:
    """Starts the job, and restarts it as the policy allows; returns the last exit code."""
    command, limit = job.command, restarts.num_remaining
    newest: int | None = None
    while True:
        ended = _Attempt(job, signals).run()
        newest = newest if ended.newest is None else ended.newest  # None: it ended before it reported its directory
        wait_s = (
            None if ended.stop_signal is not None else restarts.next_delay_s(ended.code, ended.newest, ended.before)
        )
        if wait_s is None and restarts.why:
            print_line(f"not started again: {restarts.why}")
        resized = None if wait_s is None else _resized(job, command, ended)
        if wait_s is None or resized is None:
            return ended.code
        job = resized
        saved = "no checkpoint is known" if newest is None else f"the newest checkpoint is of step {newest}"
        print_line(
            f"starting all processes again in {wait_s:g} s: {saved}; {restarts.num_remaining} of {limit} restarts are "
            "left"
        )
        if Deadline(wait_s).wait_for(lambda: any(number in STOPPING for number in signals), LAUNCH_POLL_S):
            print_line("not started again: the launcher received a signal to stop")
            return int(ExitCode.PREEMPTED)


def _check_numbers(num_processes: int, devices_per_process: int | None, grace_s: float, max_restarts: int) -> None:
    if num_processes < 1:
        raise ConfigError(f"launch -n {num_processes}: at least one process is needed. Try -n 2.")
    if devices_per_process is not None and devices_per_process < 1:
        raise ConfigError(f"--devices-per-process {devices_per_process}: at least one device is needed. Try 1.")
    if not 0 <= grace_s < 86400:
        raise ConfigError(f"--grace-s {grace_s:g}: seconds, from 0 to less than a day. Try 60.")
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: a number of starts, at least 0. Try 3.")


def _resized(job: Job, command: list[str], ended: Outcome) -> Job | None:
    """Returns the job with the number of processes of its restart, None if no number is possible."""
    if job.elasticity is None:
        return job
    before = ended.processes
    size = job.elasticity.resize(before, ended.lost)
    if size is None:
        print_line(
            f"not started again: {ended.lost} of {before} processes are lost, and no smaller number that --elastic "
            "allows divides mesh and batch"
        )
        return None
    processes, extra = size
    if processes != before:
        print_line(
            f"{ended.lost} of {before} processes are lost; the next start has {processes}, with {' '.join(extra)}: the "
            "same examples in each step"
        )
    return dataclasses.replace(job, num_processes=processes, command=[*command, *extra])


class _Attempt:
    """One start of all processes, with separate ports and a separate coordination service."""

    def __init__(self, job: Job, signals: deque[int]):
        self._job, self._signals = job, signals
        self._children: list[Child] = []
        self._logs, self._deaths, self._lock = Logs(), ReportFile(), threading.Lock()
        self._outcome = Outcome(processes=job.num_processes)
        self._membership: MembershipHistory | None = None
        num, gpus = job.num_processes, gpu_assignment.gpus(job.env)
        self._pinned = [gpu_assignment.visible_gpus(gpus, num, i, job.devices_per_process) for i in range(num)]
        if self._pinned[0]:
            assigned = ", ".join(f"{own[gpu_assignment.VISIBLE]} for process {i}" for i, own in enumerate(self._pinned))
            print_line(f"{gpu_assignment.VISIBLE}: {assigned}")

    def run(self) -> Outcome:
        """Starts all processes, and returns when all have exited."""
        job, outcome = self._job, self._outcome
        held = [reserve_port() for _ in range(2)]
        addresses = ("127.0.0.1", "127.0.0.1") if job.observer is None else job.observer.addresses
        self._addresses = [f"{address}:{port}" for address, (_, port) in zip(addresses, held, strict=True)]
        service = ServiceProcess(job.num_processes, -1, start) if job.num_processes > 1 else None
        try:
            if service is not None:
                service.listen(self._addresses[1])
                if job.observer is not None:
                    job.observer.on_service(service.pid)
            supervisor = self._start_all(service)
            outcome.stop_signal = supervisor.run()
            self._poll()
            if service is not None and self._membership is None and (status := service.ended()) is not None:
                print_line(
                    f"the process of the coordination service has ended with {status}, which ends all that use it"
                )
        finally:
            end(self._children)
            self._logs.close()
            if service is not None:
                service.kill()
            if self._membership is not None:
                outcome.processes = len(self._membership.members)
                self._membership.close()
            self._deaths.close()
            for holder, _ in held:
                holder.close()
        outcome.newest = _newest(self._logs.folder)
        if job.observer is not None:
            job.observer.on_exit(self._children, outcome.stop_signal)
        self._report_outcome()
        return outcome

    def _start_all(self, service: ServiceProcess | None) -> Supervisor:
        job = self._job
        supervisor = Supervisor(self._children, self._signals, job.grace_s, self._deaths, self._poll)
        elasticity, membership = job.elasticity, None
        if service is not None and elasticity is not None and elasticity.requested is not None:
            standby = 0 if self._pinned[0] else elasticity.standby  # the GPUs of a standby are not known in advance
            membership = self._membership = MembershipHistory(
                job.num_processes,
                elasticity.resize,
                elasticity.requested,
                self._start,
                service,
                standby,
                elasticity.precompile,
            )
            supervisor.continues, supervisor.members = membership.continues, lambda: membership.running
            supervisor.on_poll = partial(self._poll_membership, membership, supervisor)
        for process in range(job.num_processes):
            if membership is None:
                self._start(process)
            else:
                membership.add(self._start(process, *membership.process_env(process)))
        self._show_output()
        return supervisor

    def _start(
        self,
        process: int,
        variables: Mapping[str, str] = MappingProxyType({}),
        descriptors: Sequence[int] = (),
        overrides: Sequence[str] = (),
    ) -> Child:
        """Starts and returns one process; a number below 0: a standby."""
        job = self._job
        coordinator, service = self._addresses
        errors, beats, step = notes = ReportFile(), ReportFile(), ReportFile()
        env = child_environment(job.env, coordinator, job.num_processes, process, job.devices_per_process, errors.path)
        env |= {BEAT_FILE: beats.path, STEP_FILE: step.path, DEATHS_FILE: self._deaths.path, SERVICE: service}
        env |= {**(self._pinned[process] if 0 <= process < len(self._pinned) else {}), **variables}
        passed = [*descriptors, *(note.descriptor for note in (*notes, self._deaths))]
        if job.observer is not None:
            variables, opened = job.observer.process_env(process)
            env, passed = {**env, **variables}, [*passed, *opened]
        replaced = tuple(f"{setting.partition('=')[0]}=" for setting in overrides)
        command = [word for word in job.command if not replaced or not word.startswith(replaced)]
        with nullcontext() if job.observer is None else job.observer.host(process):
            popen = _start([*command, *overrides], env, pass_fds=passed)
        child = Child(process, popen, *notes)
        self._children.append(child)
        return child

    def _show_output(self) -> None:
        """Reads the output of the processes, after all have started: a reader thread delays the next start."""
        for child in self._children:
            if child.output is None and not child.is_standby:
                shown = self._job.observer is None
                child.output = Output(child.process, child.popen, self._lock, self._logs, shown=shown)

    def _poll(self) -> None:
        """Moves logs to the run directory, once a process has reported it."""
        if self._job.observer is not None:
            self._job.observer.on_poll(self._children)
        if self._logs.folder is None and (run_dir := directory_of(self._children[0].step.read())) is not None:
            self._logs.open(run_dir, len(self._children))
            self._outcome.before = _newest(self._logs.folder)

    def _poll_membership(self, membership: MembershipHistory, supervisor: Supervisor) -> None:
        self._poll()
        if not membership.poll():
            supervisor.end_all()
        self._show_output()

    def _report_outcome(self) -> None:
        """Prints, at the end of the output, how and why the attempt ended."""
        outcome = self._outcome
        exits = [c.exit for c in self._children if c.exit is not None and not c.is_removed and not c.is_standby]
        first, outcome.lost = cause(exits), len(lost(exits))
        if first is None:
            return
        outcome.code = first.code
        if first.ended_by_us and outcome.stop_signal is not None:
            print_line(f"{self._job.num_processes} processes were killed after signal {outcome.stop_signal}")
            outcome.code = 128 + outcome.stop_signal
        else:
            _explain(first, next(child for child in self._children if child.exit is first))


def _newest(folder: Path | None) -> int | None:
    """Returns the newest committed step of the run that contains this folder of logs."""
    if folder is None:
        return None
    run_dir, checkpoints = folder.parents[1], folder.parents[1] / "checkpoints"
    if not checkpoints.is_dir():  # in a bucket
        return newest_saved(run_dir)
    return max((int(p.name) for p in checkpoints.glob("*") if is_step_name(p.name)), default=None)


def child_environment(
    env: Mapping[str, str],
    coordinator: str,
    num_processes: int,
    process: int,
    devices_per_process: int | None,
    error_file: Path | str,
) -> dict[str, str]:
    """Returns the environment of one process: `env`, its rank and the cluster."""
    variables = {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(process),
        ERROR_FILE: str(error_file),
        "PYTHONUNBUFFERED": "1",
    }
    if devices_per_process is not None:
        variables[DEVICES_PER_PROCESS] = str(devices_per_process)
    child_env = {**env, **variables}
    bypass_proxies(child_env)
    return child_env


def _start(command: list[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts one process in its own session: a Ctrl-C reaches only the launcher, and the group can be killed."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start(command, env, **pipes, pass_fds=pass_fds, start_new_session=True)


def _explain(first: Exit, child: Child) -> None:
    """Prints the message of the process at fault, at the end of the output."""
    code = describe_exit_code(first.code)
    if first.code == ExitCode.PREEMPTED:
        line = f"process {first.process} stopped on request with {code}"
    elif first.blamed and list(first.blamed) != [first.process]:
        at_fault = " and ".join(map(str, first.blamed))
        line = f"process {at_fault} is at fault, reports process {first.process} ({code})"
    elif first.assigned_code is not None:
        line = f"process {first.process} was ended by the launcher ({code})"
    elif first.status < 0:
        line = f"process {first.process} failed first: {describe_status(first)} ({code})"
    else:
        line = f"process {first.process} failed first with {code}"
    tail = child.output.tail if child.output is not None else ()
    details = first.message or ("" if first.code == ExitCode.PREEMPTED else "\n".join(tail))
    print_line(visible(f"{line}{':' if details else ''}\n{details}".rstrip()))
