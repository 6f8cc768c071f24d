"""Barriers by keys, in threads that play processes over a store as the service's."""

import threading
import time
from collections import Counter

import pytest

from spmdkit.cluster.barrier import Client
from spmdkit.foundation import phase
from tests.support.threads import in_threads


class Service:
    """The four requests of JAX's client that a barrier needs."""

    def __init__(self):
        self.values, self.counts, self.changed = {}, Counter(), threading.Condition()

    def key_value_increment(self, key, increment):
        with self.changed:
            self.counts[key] += increment
            return self.counts[key]

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS: ...")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: ...")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            for kept in (self.values, self.counts):
                for name in [k for k in kept if k.startswith(f"{key}/")]:
                    del kept[name]


def test_all_arrive_before_any_continues():
    service, came = Service(), []

    def visit(process, late_s):
        client = Client(service, 3)
        for turn in range(10):
            time.sleep(late_s)
            came.append((turn, process))
            client.wait_at_barrier("same", 5000)
            assert sum(t == turn for t, _ in came) == 3, "somebody was not there"

    found = in_threads(lambda spec: visit(*spec), {p: (p, s) for p, s in enumerate((0, 0.001, 0.003))})
    assert found == dict.fromkeys(range(3)), found
    assert not service.values and not service.counts


def test_wait_is_a_wait_for_others_in_every_phase():
    """Also in orbax: a save that waits does not exceed its limit; the process that is missing does."""
    service, during = Service(), []
    service.blocking_key_value_get = lambda key, timeout_in_ms: during.append(phase.current_phase()) or "open"
    phase.begin()
    with phase.during("save"):
        Client(service, 2).wait_at_barrier("orbax", 100)
        assert phase.current_phase().phase == "save"
    phase.end()
    assert (during[0].phase, during[0].detail) == (phase.WAITING, "orbax")


def test_subset_of_processes_can_meet():
    service = Service()
    meet = lambda process: Client(service, 3).wait_at_barrier("two", 2000, process_ids=[0, 2])
    assert in_threads(meet, {0: 0, 2: 2}) == {0: None, 2: None}
    with pytest.raises(RuntimeError, match="DEADLINE_EXCEEDED: barrier 'alone': not all 3 processes"):
        Client(service, 3).wait_at_barrier("alone", 50)
    with pytest.raises(RuntimeError, match="DEADLINE_EXCEEDED"):  # a late one
        Client(service, 3).wait_at_barrier("alone", 50)


def test_given_up_barrier_releases_all():
    service = Service()
    clients = {process: Client(service, 3) for process in range(3)}

    def visit(process):
        if process == 1:
            return clients[1].give_up("save", "process 1: no room")
        with pytest.raises(RuntimeError, match="ABORTED: process 1: no room"):
            clients[process].wait_at_barrier("save", 3_600_000)

    assert in_threads(visit, {p: p for p in range(3)}) == dict.fromkeys(range(3))
    meet = lambda process: clients[process].wait_at_barrier("save", 5000)
    assert in_threads(meet, {p: p for p in range(3)}) == dict.fromkeys(range(3))


def test_client_of_an_ended_generation_ends_all_waits():
    service = Service()
    client = Client(service, 2)
    client.is_over = True
    for act in (lambda: client.key_value_set("a", "b"), lambda: client.blocking_key_value_get("a", 1000)):
        with pytest.raises(RuntimeError, match="CANCELLED"):
            act()
    assert client.own is service, "compat/membership.py leaves the service with it"
