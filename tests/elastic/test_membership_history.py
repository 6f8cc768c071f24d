"""What a launcher says of membership, and when: without processes."""

import os
import signal
import types

import pytest

from spmdkit.launch import membership as membership_module
from spmdkit.launch import standby, supervisor
from spmdkit.launch.membership import MembershipHistory
from spmdkit.launch.membership_file import MembershipFiles, MembershipUpdate, parse_ready, parse_update
from spmdkit.launch.root_cause import Exit
from spmdkit.launch.supervisor import ReportFile


class ServiceProcess:
    def __init__(self, num, process=-1, start=None):
        self.num, self.address, self.asked = num, "", False

    def listen(self, address):
        self.address = address

    def shutdown(self):
        self.asked = True

    def ended(self):
        return None

    def kill(self):
        pass


OPEN, KILLED = [], []
NOBODY = 1 << 28
"""Beyond the number of any process."""


class Child(types.SimpleNamespace):
    is_standby = supervisor.Child.is_standby


class Job:
    """A launcher's membership over processes that are a number and two files."""

    def __init__(self, num, after, requested=lambda now: None, standby=0):
        OPEN.append(self)
        self.opened = []
        self.now, self.started, self.killed = 0.0, [], []
        self.membership = MembershipHistory(
            num, after, requested, self.newcomer, ServiceProcess(num), standby, clock=lambda: self.now
        )
        self.orders = {}
        for process in range(num):
            self.child(process, *self.membership.process_env(process))

    def child(self, process, variables, descriptors):
        note = ReportFile()
        child = Child(
            process=process,
            popen=types.SimpleNamespace(pid=NOBODY + process),
            exit=None,
            step=note,
            ended_by_us=False,
            last_beat={"phase": "step"},
        )
        order, ready = (os.dup(descriptor) for descriptor in descriptors)
        self.opened += [lambda: os.close(order), lambda: os.close(ready), note.close]
        self.orders[process] = MembershipFiles(order, ready, process, int(variables["SPMDKIT_GENERATION"]))
        return self.membership.add(child)

    def newcomer(self, process, variables, descriptors, overrides):
        self.started.append((process, overrides))
        return self.child(process, variables, descriptors)

    def dies(self, process, status=-signal.SIGKILL):
        child = self.membership._children[process]
        child.exit = Exit(process, status, 0, ended_by_us=child.ended_by_us)
        return self.membership.continues(child)

    def trains(self, step):
        for child in self.membership._children.values():
            child.step.write(f"{step:20d}\n")

    def comes(self, *processes):
        for process in processes:
            order = self.orders[process].read()
            self.orders[process].report_ready(max(order.number, self.orders[process].born))
        return self.membership.poll()


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(membership_module, "ServiceProcess", ServiceProcess)
    for module in (membership_module, standby):
        monkeypatch.setattr(module, "send", lambda pid, number: KILLED.append(pid - NOBODY))
    KILLED.clear()
    yield
    while OPEN:
        job = OPEN.pop()
        job.membership.close()
        for close in job.opened:
            close()


def test_membership_update_is_read_as_written():
    order = MembershipUpdate(3, (0, 4, 2), "127.0.0.1:5", True, ("microbatches=2",), "2 is gone")
    assert parse_update(order.text()) == order
    assert parse_update(order.text()[:40]) is None and parse_update(b"") is None and parse_ready(b"") == 0


def test_newcomer_takes_the_place_of_the_dead():
    job = Job(4, lambda before, lost: (4, ["microbatches=1"]))
    job.trains(5)
    assert job.dies(0)
    order = job.orders[1].read()
    assert (order.number, order.members, order.service) == (2, (0, 1, 2, 3), "")
    assert job.started == [(0, ["microbatches=1"])] and job.orders[0].born == 2
    assert job.comes(1, 2, 3) and job.orders[1].read().service == ""
    assert job.comes(0) and job.orders[1].read().service.startswith("127.0.0.1:")
    assert [service_process.asked for service_process in job.membership._service_processes] == [True, False]


def test_fewer_members_keep_their_order():
    job = Job(4, lambda before, lost: (before - lost, ["microbatches=2"]))
    job.trains(5)
    assert job.dies(1) and job.orders[0].read().members == (0, 2, 3) and not job.started
    assert job.dies(3), "while the others leave"
    assert job.orders[0].read().members == (0, 2) and job.orders[0].read().number == 3
    assert job.comes(0, 2) and job.orders[0].read().service
    assert not job.dies(2), "one alone is started again"


def test_more_processes_join_when_ready():
    asked = []
    job = Job(2, lambda before, lost: (before - lost, []), lambda now: asked[0] if asked and now < 4 else None)
    asked.append((4, ["microbatches=1"]))
    job.now = 2.0
    assert job.membership.poll() and [process for process, _ in job.started] == [2, 3]
    assert job.orders[0].read().number == 1, "the others train"
    assert job.comes(2, 3)
    order = job.orders[0].read()
    assert (order.number, order.members, order.planned, order.service) == (2, (0, 1, 2, 3), True, "")
    assert job.comes(0, 1) and job.orders[3].read().service


@pytest.mark.parametrize("status", [70, 75, 77, 42, -signal.SIGABRT])
def test_other_ends_end_the_job(status):
    job = Job(4, lambda before, lost: (before - lost, []))
    assert not job.dies(1, status) and job.orders[0].read().number == 1


def test_generations_without_steps_end():
    job = Job(4, lambda before, lost: (4, []))
    job.trains(5)
    assert job.dies(1) and job.comes(0, 1, 2, 3)
    assert job.dies(1) and job.comes(0, 1, 2, 3)
    assert job.dies(1) and job.comes(0, 1, 2, 3)
    assert not job.dies(1)


def test_late_members_restart_all():
    job = Job(4, lambda before, lost: (before - lost, []))
    assert job.dies(1)
    job.now = membership_module.MEMBERS_READY_S + 1
    assert not job.comes(0, 2)


def test_failing_newcomer_is_not_restarted():
    job = Job(2, lambda before, lost: (before - lost, []), lambda now: (4, []))
    job.now = 2.0
    assert job.membership.poll() and len(job.started) == 2
    assert job.dies(3, 78) and job.dies(2)
    for job.now in (4.0, 6.0, 8.0):
        assert job.membership.poll() and len(job.started) == 2
    assert job.orders[0].read().number == 1


def test_stuck_member_is_killed_and_compiling_awaited():
    job = Job(4, lambda before, lost: (before - lost, []))
    job.trains(5)
    assert job.dies(3)
    job.membership._children[1].last_beat = {"phase": "compile"}
    job.now = membership_module.LEAVE_STEP_S - 1
    assert job.comes(2) and KILLED == []
    job.now = membership_module.LEAVE_STEP_S + 1
    assert job.comes(2) and job.comes(2) and KILLED == [0]
    assert job.dies(0) and job.orders[1].read().members == (1, 2)


def test_standby_takes_a_place_and_is_replaced():
    job = Job(4, lambda before, lost: (4, []), standby=1)
    looks(job)
    assert not job.started, "importing takes a core, and nobody trains yet"
    job.trains(5)
    looks(job)
    looks(job)
    assert job.started == [(-1, [])] and job.orders[-1].born == 2
    assert job.dies(2)
    order = job.orders[1].read()
    assert order.members == (0, 1, 2, 3) and order.process_of(-1) == 2 and order.process_of(1) == 1
    assert job.started == [(-1, [])], "no newcomer"
    job.orders[2] = job.orders.pop(-1)
    assert job.comes(0, 1, 2, 3) and job.orders[2].read().service and job.orders[2].read().process_of(-1) == 2
    looks(job)
    assert len(job.started) == 1, "not before all have done a step"
    job.trains(6)
    looks(job)
    assert job.started[1:] == [(-2, [])]
    assert job.dies(2) and dict(job.orders[1].read().adopted) == {-2: 2}, "the first one is dead"


def test_two_deaths_use_standby_and_newcomer():
    job = Job(4, lambda before, lost: (4, ["microbatches=1"]), standby=1)
    job.trains(5)
    looks(job)
    assert job.dies(1) and job.dies(3)
    assert job.started == [(-1, []), (3, ["microbatches=1"])] and job.orders[0].read().process_of(-1) == 1


def test_ending_standby_is_no_loss():
    job = Job(2, lambda before, lost: (2, []), standby=1)
    job.trains(5)
    for _ in range(5):
        looks(job)
        waiting = list(job.membership._standbys._waiting)
        for child in waiting:
            child.exit = Exit(child.process, 1, 0)
            assert job.membership.continues(child)
    assert job.started == [(-1, []), (-2, []), (-3, [])] and job.orders[0].read().number == 1


def test_standbys_end_with_the_job():
    job = Job(2, lambda before, lost: (2, []), standby=2)
    job.trains(5)
    looks(job)
    assert job.started == [(-1, []), (-2, [])]
    job.membership._children[0].exit = Exit(0, 0, 0)
    looks(job)
    assert KILLED == [-1, -2] and job.started == [(-1, []), (-2, [])]


def looks(job):
    job.now += 2.0
    assert job.membership.poll()


def test_idle_member_in_a_step_is_killed(
    monkeypatch,
):
    busy = {NOBODY + process: 0 for process in range(5)}
    monkeypatch.setattr(membership_module, "busy_ns", lambda pid: busy[pid])
    job = Job(5, lambda before, lost: (before - lost, []))
    job.trains(5)
    assert job.dies(4)
    job.membership._children[2].last_beat = {"phase": "data"}
    for _ in range(8):
        job.now += 0.25
        busy[NOBODY] += 1_000_000
        busy[NOBODY + 1] += 100_000_000
        assert job.comes(3)
    assert KILLED == [0] and job.now < membership_module.LEAVE_STEP_S
    monkeypatch.setattr(membership_module, "busy_ns", lambda pid: None)
    assert job.comes(3) and KILLED == [0], "where it cannot be seen, it takes longer"
