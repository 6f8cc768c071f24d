"""`MembershipHistory`: a job that continues without lost processes.

    a member dies       -> update k: the members of generation k; newcomers are started for it
    all report ready k  -> the coordination service of generation k, and its address

A death unlike a machine failure (a user error, a stop, an abort by JAX) ends the job, and `--max-restarts` restarts it.
So does a generation in which a member is not ready within `MEMBERS_READY_S`, or the third generation in sequence in
which no step is completed.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from spmdkit.cluster.service import ServiceProcess, reserve_port
from spmdkit.foundation.constants import GENERATION, MEMBER, MEMBERSHIP_FILE, NUM_PROCESSES, PROCESS_ID, READY_FILE
from spmdkit.foundation.run_status import step_of
from spmdkit.foundation.timeouts import IDLE_IN_STEP_S, LEAVE_STEP_S, MEMBERS_READY_S, RESIZE_POLL_S
from spmdkit.launch.membership_file import MembershipUpdate, parse_ready
from spmdkit.launch.precompile import Precompile
from spmdkit.launch.process import busy_ns, print_line, send, start
from spmdkit.launch.root_cause import describe_status, lost
from spmdkit.launch.standby import Standbys
from spmdkit.launch.supervisor import Child, ReportFile

BUSY_SHARE = 0.01
"""A process that waits in a step and uses at most this fraction of a core for `IDLE_IN_STEP_S` is stuck. It is killed
immediately."""
PHASES_WITHOUT_PROGRESS = ("step", "data", "waiting")
"""Phases in which a process waits for the others. Compilation, restore and save complete without them."""
MAX_IDLE = 3
MIN_PROCESSES = 2

Resize = Callable[[int, int], "tuple[int, list[str]] | None"]
"""(processes before, lost) -> (processes of the next generation, `key=value` overrides of their config), None if no
number is possible."""
RequestedSize = Callable[[int], "tuple[int, list[str]] | None"]
"""Number of processes now -> the same tuple for more processes, None if no more are requested."""


class Elasticity(NamedTuple):
    """How the number of processes of a job changes (elastic/sizes.py)."""

    resize: Resize  # the number of processes after a loss
    requested: RequestedSize | None = (
        None  # the number of processes that the job should have now; None: it stops at a loss
    )
    standby: int = 0  # spare processes that replace lost ones (standby.py)
    precompile: Precompile | None = None  # compiles for other numbers of processes in advance


class MembershipHistory:
    """The membership of one attempt.

    Args:
        newcomer: starts one process: (its number, variables, descriptors, `key=value` overrides) -> the child.
        service_process: the coordination service of the first generation.

    Attributes:
        running: the process of each rank in the generation that started last.
    """

    def __init__(
        self,
        num: int,
        resize: Resize,
        requested: RequestedSize,
        newcomer: Callable[[int, Mapping[str, str], Sequence[int], Sequence[str]], Child],
        service_process: ServiceProcess,
        standby: int = 0,
        precompile: Precompile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._resize, self._requested, self._newcomer, self._clock = resize, requested, newcomer, clock
        self._update = MembershipUpdate(1, tuple(range(num)), service="given by the environment")
        self._file = ReportFile()
        self._file.write(self._update.text())
        self._ready: dict[int, ReportFile] = {}
        self._children: dict[int, Child] = {}
        self._service_processes, self._holders = [service_process], list[socket.socket]()
        self._since: float | None = None  # start of the wait for all members
        self._planned: MembershipUpdate | None = None  # newcomers are started for it while the members train
        self._stopped: set[int] = set()
        self._killed: list[Child] = []
        self._busy: dict[int, tuple[float, int]] = {}  # process -> (start of a possible idle period, `busy_ns` then)
        self._refused = 0
        self._last_poll, self._best, self._idle = clock(), -1, 0
        self.running = tuple(range(num))
        self._precompile = precompile or Precompile({}, [], None)
        self._standbys, self._step_at_change = Standbys(standby, self._start_standby), -1
        self.failure = ""

    # ---- environment of a process ----

    def process_env(self, process: int, born: int = 1) -> tuple[Mapping[str, str], list[int]]:
        """Returns the environment variables and open descriptors of one process."""
        if process in self._ready:
            self._ready[process].close()
        ready = self._ready[process] = ReportFile()
        variables = {MEMBERSHIP_FILE: self._file.path, READY_FILE: ready.path}
        return variables | {MEMBER: str(process), GENERATION: str(born)}, [self._file.descriptor, ready.descriptor]

    def add(self, child: Child) -> Child:
        self._children[child.process] = child
        return child

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the newest generation, in rank order."""
        return self._update.members

    # ---- deaths ----

    def continues(self, child: Child) -> bool:
        """Returns whether the others continue without a process that has exited; notifies them."""
        assert child.exit is not None
        if self._standbys.has_ended(child):
            return True
        if child.process in self._stopped:
            self._stopped.discard(child.process)
            return True
        if self._planned is not None and child.process in self._planned.members[len(self._update.members) :]:
            print_line(f"process {child.process}, which was to join, has ended; {len(self.members)} continue as before")
            self._refused = len(self._planned.members)  # requested again when the number changes
            self._cancel(self._planned)
            return True
        if self.failure or not lost([child.exit]) or child.process not in self._update.members:
            return False
        living = [p for p in self._update.members if self._children[p].exit is None]
        size = self._resize(len(self._update.members), 1)
        if len(living) < MIN_PROCESSES - 1 or size is None or size[0] < MIN_PROCESSES or self._is_stalled():
            return False
        if self._planned is not None:
            self._cancel(self._planned)
        self._change_members(living, child.process, size, f"process {child.process}: {describe_status(child.exit)}")
        return True

    def _change_members(self, living: list[int], dead: int, size: tuple[int, list[str]], why: str) -> None:
        processes, overrides = size
        members = [p for p in self._update.members if p in living]
        for process in members[processes:]:
            self._stop_process(process)
        members = members[:processes]
        free = [p for p in (dead, *range(processes + len(self._children))) if p not in members]
        added = list(dict.fromkeys(free))[: processes - len(members)]
        started = [*added]
        if added and added[0] == dead:  # a newcomer with its number takes its rank
            members.insert(min(self._update.members.index(dead), len(members)), added.pop(0))
        members += added
        self._standbys.lost(dead)
        self._busy.clear()
        replaced = [process for process in started if self._adopt(process)]
        adopted = tuple(self._standbys.adopted.items())
        self._update = MembershipUpdate(
            self._update.number + 1, tuple(members), overrides=tuple(overrides), why=why, adopted=adopted
        )
        self._file.write(self._update.text())
        self._since = self._clock()
        places = f"; a standby takes the place of process {' and '.join(map(str, replaced))}" if replaced else ""
        print_line(
            f"{why}; {len(living)} continue without a restart, as {len(members)} processes (generation "
            f"{self._update.number}){places}"
        )
        self._prepare(processes)
        for process in started:
            if process not in replaced:
                self._start(process, self._update)

    def _is_stalled(self) -> bool:
        """Returns whether the membership changes repeatedly without a completed step."""
        newest = max((step for step in self._steps(self._children) if step is not None), default=-1)
        self._step_at_change = max(self._step_at_change, newest)
        self._idle = 0 if newest > self._best else self._idle + 1
        self._best = max(self._best, newest)
        return self._idle >= MAX_IDLE

    def _steps(self, processes: Iterable[int]) -> list[int | None]:
        return [step_of(self._children[process].step.read()) for process in processes]

    # ---- every poll of the launcher ----

    def poll(self) -> bool:
        """Performs the changes that are due; returns False if all processes must be restarted."""
        now = self._clock()
        gone = [p for p in self._update.members if self._children[p].exit is not None]
        if gone:
            self._standbys.end()
            self._precompile.end()
            if self._planned is not None:
                self._cancel(self._planned)
        if self._since is not None:
            if gone or now - self._since > MEMBERS_READY_S:
                self.failure = f"process {gone[0]} has ended" if gone else f"not all came within {MEMBERS_READY_S:g} s"
                print_line(f"generation {self._update.number} is abandoned: {self.failure}")
                self._since = None
                return False
            if all(self._is_ready(p, self._update.number) for p in self._update.members):
                self._start_generation()
            else:
                self._kill_stuck(now, is_late=now - self._since > LEAVE_STEP_S)
        elif self._planned is not None:
            new = self._planned.members[len(self._update.members) :]
            if all(self._is_ready(p, self._planned.number) for p in new):
                self._update, self._planned, self._since = self._planned, None, now
                self._file.write(self._update.text())
        elif now - self._last_poll > RESIZE_POLL_S:
            self._last_poll = now
            if all(step is not None and step > self._step_at_change for step in self._steps(self._update.members)):
                self._standbys.fill()  # not earlier: it takes a core that all members wait for
                self._precompile.poll()
            self._add_processes()
        return True

    def _kill_stuck(self, now: float, is_late: bool) -> None:
        """Kills members that do not finish the step of the previous generation."""
        for process in self._update.members:
            child = self._children[process]
            phase = str((child.last_beat or {}).get("phase", ""))
            waits = phase in PHASES_WITHOUT_PROGRESS or phase.startswith("hook")
            if not waits or child in self._killed or self._is_ready(process, self._update.number):
                continue
            if is_late or (phase != "data" and self._is_idle(child, now)):
                why = f"within {LEAVE_STEP_S:g} s" if is_late else "and is idle"
                print_line(f"process {process} does not finish its step {why}, and is killed")
                self._killed.append(child)
                send(child.popen.pid, signal.SIGKILL)

    def _is_idle(self, child: Child, now: float) -> bool:
        """Returns whether a process has used at most `BUSY_SHARE` of a core for `IDLE_IN_STEP_S`."""
        busy = busy_ns(child.popen.pid)
        if busy is None:
            return False
        since, before = self._busy.setdefault(child.process, (now, busy))
        if busy - before > BUSY_SHARE * IDLE_IN_STEP_S * 1e9:
            self._busy[child.process] = (now, busy)
            return False
        return now - since >= IDLE_IN_STEP_S

    def _is_ready(self, process: int, number: int) -> bool:
        return parse_ready(self._ready[process].read()) >= number

    def _prepare(self, num: int) -> None:
        for service_process in self._service_processes[1:]:
            if service_process.ended() is not None:
                self._service_processes.remove(service_process)
                service_process.kill()
        self._service_processes.append(ServiceProcess(num, -1, start))

    def _start_generation(self) -> None:
        holder, port = reserve_port()
        self._holders.append(holder)
        if len(self._holders) > 2:
            self._holders.pop(0).close()
        service, self.running = f"127.0.0.1:{port}", self._update.members
        self._service_processes[-1].listen(service)
        self._update = dataclasses.replace(self._update, service=service)
        self._file.write(self._update.text())
        self._since = None
        for service_process in self._service_processes[:-1]:
            service_process.shutdown()  # it runs while a process is connected

    def _add_processes(self) -> None:
        """Starts newcomers if more processes are requested; the others train until the newcomers can join."""
        now = len(self._update.members)
        size = self._requested(now)
        if size is None or size[0] <= now or size[0] == self._refused:
            self._refused = 0 if size is None else self._refused
            return
        free = [p for p in range(size[0] + len(self._children)) if p not in self._update.members]
        added = free[: size[0] - now]
        members, why = (*self._update.members, *added), f"{size[0]} processes are requested"
        number, overrides = self._update.number + 1, tuple(size[1])
        self._planned = MembershipUpdate(number, members, planned=True, overrides=overrides, why=why)
        print_line(f"{why} instead of {now}: {len(added)} more are started, and join as soon as they can")
        self._prepare(size[0])
        for process in added:
            self._start(process, self._planned)

    def _start(self, process: int, update: MembershipUpdate) -> None:
        variables, descriptors = self.process_env(process, update.number)
        place = {NUM_PROCESSES: str(len(update.members)), PROCESS_ID: str(update.members.index(process))}
        variables = {**variables, **place}  # for environment detection; the update that it waits for takes precedence
        self.add(self._newcomer(process, variables, descriptors, list(update.overrides)))

    def _start_standby(self, number: int) -> Child:
        variables, descriptors = self.process_env(number, self._update.number + 1)
        return self._newcomer(number, {**variables, PROCESS_ID: "0"}, descriptors, [])

    def _adopt(self, process: int) -> bool:
        standby = self._standbys.adopt(process)
        if standby is not None:
            number, child = standby
            if process in self._ready:
                self._ready[process].close()
            self._ready[process] = self._ready.pop(number)
            self.add(child)
        return standby is not None

    def _cancel(self, update: MembershipUpdate) -> None:
        for process in update.members[len(self._update.members) :]:
            if self._children[process].exit is None:
                self._stop_process(process)
        self._planned = None

    def _stop_process(self, process: int) -> None:
        child = self._children[process]
        child.ended_by_us = True
        self._stopped.add(child.process)
        send(child.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        self._precompile.end()
        for service_process in self._service_processes[1:]:
            service_process.kill()
        for note in (self._file, *self._ready.values()):
            note.close()
        for holder in self._holders:
            holder.close()
