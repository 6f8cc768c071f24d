"""`Membership`: moves this process from one generation of its job to the next, with the state in its memory.

    1. The launcher publishes the members of generation k (launch/membership_file.py). A thread reads them, ends all
       waits for other processes, and shuts down the connections of blocked collectives (gloo_sockets.py).
    2. The training thread gets an error, or detects the change between two steps. `is_membership_change` returns
       whether it is due to the change of members.
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
from spmdkit.elastic.peer_memory import Copier, HostMemory, SnapshotReader
from spmdkit.elastic.redistribute import complete_snapshot, find_newest
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

    def __init__(self, files: MembershipFiles, every: int):
        self._files, self._every = files, every
        self.number, self.memory = files.born, HostMemory()
        self._update: MembershipUpdate | None = None  # the next update
        self._peer_died, self._disconnected = threading.Event(), threading.Event()
        self._transport = CollectiveTransport()
        self._copier: Copier | None = None
        self._thread: threading.Thread | None = None
        self._must_wait = files.born > 1  # for an update, before it joins

    def wait_for_generation(
        self, spec: ClusterSpec, warm: Callable[[], None]
    ) -> tuple[ClusterSpec, Generation, tuple[str, ...]]:
        """Returns (the cluster spec of this process, the generation to join, config overrides `key=value`), once all
        processes are ready. `warm`: called first by a standby."""
        self._transport = CollectiveTransport()
        if not self._must_wait:
            return spec, Generation(self.number, self._transport.record_ports()), ()
        if self._files.member < 0:
            warm()
        update = self._wait_for_update()
        self.number, self._must_wait = update.number, False
        joined = dataclasses.replace(
            spec,
            coordinator=update.service,
            service=update.service,
            num_processes=len(update.members),
            process_id=update.members.index(self._files.member),
            notes=(f"generation {update.number}: {update.why}",),
            found_by="",
        )
        return joined, Generation(update.number, self._transport.record_ports()), update.overrides

    def _wait_for_update(self) -> MembershipUpdate:
        """Reports the generation for which this process is ready; returns the update that starts it."""
        deadline, ready = Deadline(MEMBERSHIP_UPDATE_S), 0
        while not deadline.expired:
            update = self._files.read()
            if update is not None and self._files.member < 0:  # a standby: no process has died yet
                deadline = Deadline(MEMBERSHIP_UPDATE_S)
                self._files.member = update.process_of(self._files.member)
            newest = max(self._files.born, 0 if update is None else update.number)
            if newest > ready:
                ready = newest
                self._files.report_ready(ready)
            if update is not None and update.number == ready and update.service:
                if self._files.member in update.members:
                    return update
                if self._files.member >= 0:
                    raise RendezvousError("this process was removed from the job")
            time.sleep(MEMBERSHIP_POLL_S)
        raise RendezvousError(
            f"the launcher has not published the next membership within {MEMBERSHIP_UPDATE_S:g} s. See its output, and "
            "start the job again."
        )

    def start_listening(self, cluster: Cluster) -> None:
        """Starts to listen to the launcher. Called on all processes, right after `join`."""
        # `disconnect` then collects only objects of this generation. A full collection takes 0.2 s; all processes wait.
        gc.freeze()
        self._peer_died.clear()
        self._disconnected.clear()
        self._update = None
        client = compat.coordination_client()
        self._thread = threading.Thread(target=self._listen, args=(client,), name="spmdkit-membership", daemon=True)
        self._thread.start()
        ports = cluster.gather("ports", self._transport.local_ports)
        self._transport.all_ports = {port for of_process in ports for port in of_process}

    def _listen(self, client: Any) -> None:
        while not self._disconnected.wait(DISCONNECT_AGAIN_S if self._peer_died.is_set() else MEMBERSHIP_POLL_S):
            update = self._files.read()
            if update is None or update.number <= self.number:
                continue
            self._update = update
            if not update.planned:
                if client is not None:
                    client.is_over = True
                self._peer_died.set()
                self._transport.shut_down()

    def after_step(self, run: Any, step: int, state: Any) -> None:
        """Takes a snapshot if one is due, and ends the generation if all processes agree. Called on all processes after
        each step and before the first. Raises MembershipChanged if the next generation starts."""
        if self._peer_died.is_set():
            raise MembershipChanged("another process died")
        update = self._update
        ends = run.cluster.agree(
            f"generation/{run.hook_runner.generation}", step, update is not None and update.planned, LAG
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
            Deadline(MEMBERSHIP_NOTICE_S).wait_for(lambda: self._update is not None, MEMBERSHIP_POLL_S)
            raise MembershipChanged("more processes have come")

    def restore(self, cluster: Cluster, program: Program, checkpoints: Checkpoints | None) -> Restored | None:
        """Returns the state from the memory of all processes; None if a checkpoint is newer or no state is complete."""
        if self.number == 1:
            return None
        on_disk = None if checkpoints is None else latest_for_all(cluster, checkpoints)
        newest = find_newest(cluster, self.memory, on_disk or 0)
        if newest is None:
            self.memory.snapshots.clear()
            return None
        step, holders = newest
        snapshot = complete_snapshot(cluster, self.memory, step, holders, program.abstract_state)
        state, record, lines = restored(SnapshotReader(snapshot), step, program)
        self.memory.snapshots.clear()  # the next snapshot is for the new mesh
        return Restored(step, state, record, lines, {}, is_saved=step == on_disk)

    def is_membership_change(self, error: BaseException | None) -> bool:
        """Returns whether an error is due to the death of another process and the next generation starts. May wait a
        moment for the launcher's update."""
        if isinstance(error, MembershipChanged):
            return self._update is not None
        if not isinstance(error, Exception):
            return False
        is_lost = lost_peer(error)  # also an error raised in a user's hook that waited for a metric
        if isinstance(error, FINAL) and not is_lost:
            return False
        return self._peer_died.wait(MEMBERSHIP_NOTICE_S if is_lost else 0.0)

    def disconnect(self) -> None:
        """Leaves the backend. No other object may refer to objects of this generation."""
        self._copier, self._must_wait = None, True
        _clear_caches()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that a save has not started
            gc.collect()
        compat_membership.disconnect_backend()
        self._disconnected.set()  # after `disconnect_backend`: pending work may open further connections until then
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
    files = open_membership_files(env)
    return None if files is None else Membership(files, snapshot_every)
