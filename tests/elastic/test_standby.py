"""A standby before it has a place: what it has done by then, which orders are none of its own, and which rank it
gets."""

import sys

import pytest

from spmdkit.cluster.spec import ClusterSpec
from spmdkit.config import load_config
from spmdkit.elastic import membership as membership_module
from spmdkit.elastic.driver import warm_up
from spmdkit.elastic.membership import Membership
from spmdkit.errors import RendezvousError
from spmdkit.launch.membership_file import MembershipUpdate

SPEC = ClusterSpec("localhost:1", 4, 0)


class MembershipFiles:
    """Those of a list, one after the other."""

    def __init__(self, member, born, *orders):
        self.member, self.born, self.left, self.ready = member, born, list(orders), []

    def read(self):
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def report_ready(self, number):
        self.ready.append(number)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(membership_module, "MEMBERSHIP_POLL_S", 0.0)


def test_standby_takes_the_place_it_is_given():
    order = MembershipUpdate(3, (0, 1, 2, 3), "", adopted=((-1, 2), (-2, 0)))
    orders = MembershipFiles(
        -1,
        2,
        None,
        MembershipUpdate(1, (0, 1, 2, 3), "h:1"),
        MembershipUpdate(2, (0, 1, 2, 3), "h:2", adopted=((-2, 0),)),
        order,
        MembershipUpdate(**{**vars(order), "service": "h:3"}),
    )
    warmed_up = []
    spec, generation, _ = Membership(orders, 5).wait_for_generation(SPEC, lambda: warmed_up.append(orders.ready[:]))
    assert (spec.process_id, spec.num_processes, spec.service, generation.number) == (2, 4, "h:3", 3)
    assert orders.member == 2 and orders.ready == [2, 3] and warmed_up == [[]], "warm before it waits"


class Polls:
    """A deadline in polls instead of seconds."""

    def __init__(self, limit):
        self.left = limit

    @property
    def expired(self):
        self.left -= 1
        return self.left < 0


def test_standby_waits_longer_than_members(monkeypatch):
    monkeypatch.setattr(membership_module, "Deadline", Polls)
    monkeypatch.setattr(membership_module, "MEMBERSHIP_UPDATE_S", 0)
    idle = MembershipUpdate(1, (0, 1), "h:1")
    with pytest.raises(RendezvousError, match="has not published"):
        Membership(MembershipFiles(0, 2, idle), 5).wait_for_generation(SPEC, list)
    monkeypatch.setattr(membership_module, "MEMBERSHIP_UPDATE_S", 100)
    taken = MembershipUpdate(2, (0, 1), "h:2", adopted=((-1, 1),))
    orders = MembershipFiles(-1, 2, *[idle] * 300, taken)
    assert Membership(orders, 5).wait_for_generation(SPEC, list)[0].process_id == 1


def test_removed_process_is_refused():
    with pytest.raises(RendezvousError, match="removed from the job"):
        Membership(MembershipFiles(2, 2, MembershipUpdate(2, (0, 1), "h:2")), 5).wait_for_generation(SPEC, list)


def test_warm_standby_has_imported_and_has_no_devices(tmp_path, monkeypatch):
    """Called in this process, whose devices others need: only what is asked of JAX is looked at."""
    (tmp_path / "mine.py").write_text(
        "import spmdkit as sk\nIMPORTED = True\n@sk.task\ndef task():\n    raise ValueError\n"
    )
    (tmp_path / "run.yaml").write_text("task: mine.py:task\nsteps: 1\nbatch_size: 1\nrun_dir: run\n")
    left = []
    monkeypatch.setattr("spmdkit.compat.backends_initialized", lambda: True)
    monkeypatch.setattr("spmdkit.compat.membership.disconnect_backend", lambda: left.append(True))
    warm_up(load_config(tmp_path / "run.yaml"))
    assert any(getattr(m, "IMPORTED", False) for name, m in list(sys.modules.items()) if name.endswith("mine")) and left
    (tmp_path / "mine.py").write_text("raise ValueError\n")
    warm_up(load_config(tmp_path / "run.yaml"))  # told where the run needs it
