"""`Membership`: moves this process from one generation of its job to the next, with the state in its memory.

    1. The launcher publishes the members of generation k (launch/membership_file.py). A thread reads them, ends all
       waits for other processes, and shuts down the connections of blocked collectives (gloo_sockets.py).
    2. The training thread gets an error, or detects the change between two steps. `takes` returns whether it is due to
       the change of members.
    3. The process leaves its backend, reports that it is ready, and waits for the address of the next service.
    4. It joins with its new rank. The run starts as after a restart, but restores from the memory of the processes
       (peer_memory.py, redistribute.py).

In all other cases the process exits with an error, and the launcher restarts all from the newest checkpoint. Verified
only on CPU devices (Gloo); untested on GPU and TPU.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from spmdkit import compat
from spmdkit.checkpoint import Checkpoints, save_barrier
from spmdkit.cluster import Cluster
from spmdkit.cluster.join import Generation
from spmdkit.cluster.spec import ClusterSpec
from spmdkit.compat import membership as compat_membership
from spmdkit.elastic.gloo_sockets import CollectiveTransport
from spmdkit.elastic.peer_memory import Copier, FromMemory, HostMemory
from spmdkit.elastic.redistribute import completed, found
from spmdkit.errors import CheckpointError, ConfigError, NonFiniteError, Preempted, RendezvousError, UserCodeError
from spmdkit.faults import lost_peer
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import DISCONNECT_AGAIN_S, MEMBERSHIP_NOTICE_S, MEMBERSHIP_POLL_S, MEMBERSHIP_UPDATE_S
from spmdkit.launch.membership_file import MembershipFiles, MembershipUpdate, open_membership_files
from spmdkit.program.program import Program
from spmdkit.program.restore import restored
from spmdkit.run.recovery.restore import Restored, latest_for_all

LAG = 16  # steps that may be in flight when processes agree on the last step of a generation
FINAL = (ConfigError, NonFiniteError, CheckpointError, Preempted, UserCodeError)
"""Errors that end a run even if a process has died."""


class MembershipChanged(RendezvousError):
    """This process moves to the next generation; not a failure."""


class Membership:
    """The membership of this process; see the module docstring.

    Attributes:
        number: the current generation, or the one that is being joined.
        memory: the state of the last steps.
    """

    def __init__(self, orders: MembershipFiles, every: int):
        self._orders, self._every = orders, every
        self.number, self.memory = orders.born, HostMemory()
        self._order: MembershipUpdate | None = None  # the next update
        self._called, self._gone = threading.Event(), threading.Event()
        self._wires = CollectiveTransport()
        self._copier: Copier | None = None
        self._thread: threading.Thread | None = None
        self._waits = orders.born > 1  # for an update, before it joins

    def place(self, spec: ClusterSpec, warm: Callable[[], None]) -> tuple[ClusterSpec, Generation, tuple[str, ...]]:
        """Returns (the cluster spec of this process, the generation to join, config overrides `key=value`), once all
        processes are ready. `warm`: called first by a standby."""
        self._wires = CollectiveTransport()
        if not self._waits:
            return spec, Generation(self.number, self._wires.noticed()), ()
        if self._orders.member < 0:
            warm()
        order = self._awaited()
        self.number, self._waits = order.number, False
        joined = dataclasses.replace(
            spec,
            coordinator=order.service,
            service=order.service,
            num_processes=len(order.members),
            process_id=order.members.index(self._orders.member),
            notes=(f"generation {order.number}: {order.why}",),
            found_by="",
        )
        return joined, Generation(order.number, self._wires.noticed()), order.overrides

    def _awaited(self) -> MembershipUpdate:
        """Reports the generation for which this process is ready; returns the update that starts it."""
        deadline, ready = Deadline(MEMBERSHIP_UPDATE_S), 0
        while not deadline.expired:
            order = self._orders.read()
            if order is not None and self._orders.member < 0:  # a standby: no process has died yet
                deadline = Deadline(MEMBERSHIP_UPDATE_S)
                self._orders.member = order.process_of(self._orders.member)
            newest = max(self._orders.born, 0 if order is None else order.number)
            if newest > ready:
                ready = newest
                self._orders.say_ready(ready)
            if order is not None and order.number == ready and order.service:
                if self._orders.member in order.members:
                    return order
                if self._orders.member >= 0:
                    raise RendezvousError("this process was removed from the job")
            time.sleep(MEMBERSHIP_POLL_S)
        raise RendezvousError(
            f"the launcher has not published the next membership within {MEMBERSHIP_UPDATE_S:g} s. See its output, and "
            "start the job again."
        )

    def joined(self, cluster: Cluster) -> None:
        """Starts to listen to the launcher. Called on all processes, right after `join`."""
        # `leave` then collects only objects of this generation: a full collection takes 0.2 s, and all processes wait.
        gc.freeze()
        self._called.clear()
        self._gone.clear()
        self._order = None
        client = compat.coordination_client()
        self._thread = threading.Thread(target=self._listen, args=(client,), name="spmdkit-membership", daemon=True)
        self._thread.start()
        ports = cluster.gather("ports", self._wires.own)
        self._wires.others = {port for of_process in ports for port in of_process}

    def _listen(self, client: Any) -> None:
        while not self._gone.wait(DISCONNECT_AGAIN_S if self._called.is_set() else MEMBERSHIP_POLL_S):
            order = self._orders.read()
            if order is None or order.number <= self.number:
                continue
            self._order = order
            if not order.planned:
                if client is not None:
                    client.is_over = True
                self._called.set()
                self._wires.cut()

    def after_step(self, run: Any, step: int, state: Any) -> None:
        """Takes a snapshot if one is due, and ends the generation if all processes agree. Called on all processes after
        each step and before the first. Raises MembershipChanged if the next generation starts."""
        if self._called.is_set():
            raise MembershipChanged("another process died")
        order = self._order
        ends = run.cluster.agree(
            f"generation/{run.hook_runner.generation}", step, order is not None and order.planned, LAG
        )
        if ends or step % self._every == 0 or not self.memory.snapshots:
            if self._copier is None:
                self._copier = Copier(run.program.mesh)
            begun = time.perf_counter()
            with run.reporter.throughput.paused():
                snapshot = self._copier.take(step, state, run.record(step))
            if not self.memory.snapshots:
                took_s = round(time.perf_counter() - begun, 4)
                run.events.write("snapshot_taken", step=step, bytes=snapshot.num_bytes, seconds=took_s)
            self.memory.put(snapshot)
        if ends:
            run.cluster.barrier("the last step of the generation")  # no process leaves during another one's step
            # Another process may read the update and request the end before this process reads it.
            Deadline(MEMBERSHIP_NOTICE_S).wait_for(lambda: self._order is not None, MEMBERSHIP_POLL_S)
            raise MembershipChanged("more processes have come")

    def restored(self, cluster: Cluster, program: Program, checkpoints: Checkpoints | None) -> Restored | None:
        """Returns the state from the memory of all processes; None if a checkpoint is newer or no state is complete."""
        if self.number == 1:
            return None
        on_disk = None if checkpoints is None else latest_for_all(cluster, checkpoints)
        newest = found(cluster, self.memory, on_disk or 0)
        if newest is None:
            self.memory.snapshots.clear()
            return None
        step, holders = newest
        snapshot = completed(cluster, self.memory, step, holders, program.abstract_state)
        state, record, lines = restored(FromMemory(snapshot), step, program)
        self.memory.snapshots.clear()  # the next snapshot is for the new mesh
        return Restored(step, state, record, lines, {}, is_saved=step == on_disk)

    def takes(self, error: BaseException | None) -> bool:
        """Returns whether an error is due to the death of another process and the next generation starts. May wait a
        moment for the launcher's update."""
        if isinstance(error, MembershipChanged):
            return self._order is not None
        if not isinstance(error, Exception):
            return False
        is_lost = lost_peer(error)  # also an error raised in a user's hook that waited for a metric
        if isinstance(error, FINAL) and not is_lost:
            return False
        return self._called.wait(MEMBERSHIP_NOTICE_S if is_lost else 0.0)

    def leave(self) -> None:
        """Leaves the backend. No other object may refer to objects of this generation."""
        self._copier, self._waits = None, True
        _clear_caches()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that a save has not started
            gc.collect()
        compat_membership.leave_backend()
        self._gone.set()  # after `leave_backend`: pending work may open further connections until then
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        save_barrier.reset_counters()
        gc.collect()


def _clear_caches() -> None:
    """Clears the caches of functions: some contain programs and devices of the previous generation."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("spmdkit", "orbax"):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    with suppress(Exception):
                        clear()


def membership_from_env(env: Mapping[str, str], snapshot_every: int) -> Membership | None:
    """Returns the membership of this process; None if it has no launcher."""
    orders = open_membership_files(env)
    return None if orders is None else Membership(orders, snapshot_every)
