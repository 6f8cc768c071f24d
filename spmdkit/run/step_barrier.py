"""No process begins a step before all can: so an error of the user's in one of them finds all others with the state of
the last good step.

A step gets the memory of the state before it. A process that is inside a step which another one cannot begin, since its
data raised, has nothing left to save. So where a user's own code runs between steps (examples one by one, hooks), each
process says when it is ready for the next step, and waits until all are. One that cannot says why instead; nobody
begins the step, all save the state they have, and end with its exit code.

    process 1   | ready 7 | step 7 | data of step 8 raise -> "cannot" | save step 7 | 70
    the others  | ready 7 | step 7 | ready 8, wait ................. | save step 7 | 70, process 1 is named

What a hook raises after a step is kept until its process is to get ready for the next: what all have decided to do
after that step is done by all.

Wire, per step: one put and usually one listing of the store, 0.3 ms on a quiet machine (cluster/store.py), beside the
step in flight. Two processes on two busy cores took 7.7 and 8.6 ms a step with it, 8.8 and 7.0 without (2026-11-23).
`checkpoint.on_error_s: null` saves that.
Where nothing of the user's runs between steps, nothing is asked; nor with more processes than `MOST`, whose listings
one process would have to answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from spmdkit.cluster import Cluster
from spmdkit.errors import ExitCode, RendezvousError, UserCodeError
from spmdkit.faults import describe
from spmdkit.foundation import phase

MOST = 64
"""Processes up to which all wait for all."""
SHORTEST_S, LONGEST_S, SHARE = 0.0002, 0.005, 0.1
"""A pause before the store is asked again: a tenth of the wait so far, so that nobody begins much later than he
could."""
TOLD_S = 5.0
"""How long process 0, which holds the store, waits at the end until the others need it no more."""


class OtherFailed(UserCodeError):
    """The user's code raised in another process. `blamed`: which, for the launcher; `exit_code`: as there."""

    def __init__(self, text: str, process: int, code: int):
        super().__init__(text)
        self.blamed, self.exit_code = (process,), ExitCode(code)


class Together:
    """The processes of one run, between their steps.

    Args:
        wanted: whether code of the user's runs between steps here, and the state is to be saved when that raises. All
            do what one wants.

    Attributes:
        is_on: whether processes wait for each other.
        ended: no process begins another step; each has the state of the last one.
        stops: `ended`, because one was asked to stop and its data do not come.
    """

    def __init__(
        self,
        cluster: Cluster,
        wanted: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._me, self._num, self._clock, self._sleep = cluster.process_index, cluster.num_processes, clock, sleep
        several = 1 < cluster.num_processes <= MOST
        self.is_on = several and "yes" in cluster.gather("wait for all before a step", "yes" if wanted else "no")
        self.ended = self.stops = False
        self._number = 0  # of the steps and batches of evaluations that were set out for
        if self.is_on:
            self._store, self._folder = cluster.board("together")
            self._longest_s = LONGEST_S * max(1.0, self._num / 8)

    @contextmanager
    def setting_out(self) -> Iterator[None]:
        """The body gets this process ready for what all do next; what it raises is told to the others. Left when all
        are ready.

        Raises:
            OtherFailed: one of the others cannot.
        """
        if not self.is_on or self.ended:
            yield
            return
        self._number += 1
        try:
            yield
        except Exception as error:
            self._end("failed", *_told(error))
            raise
        if not self.stops:
            self._say(["ready", self._number])
            self._wait()

    def stop(self) -> None:
        """Tells the others, instead of being ready, that this process stops here, and they with it."""
        self.stops = True
        if self.is_on:
            self._end("stops")

    def part(self) -> None:
        """Returns when the others need the store no more: process 0, which holds it, leaves last. Bounded, and never
        raises."""
        if not (self.is_on and self.ended):
            return
        with suppress(RendezvousError):
            self._store.put(f"{self._folder}/parted/{self._me}", "", overwrite=True)
            deadline = self._clock() + TOLD_S
            while self._me == 0 and self._clock() < deadline:
                if len(self._store.entries(f"{self._folder}/parted")) == self._num:
                    return
                self._sleep(0.01)

    def _end(self, *what: Any) -> None:
        self.ended = True
        phase.mark_ending()  # that another one leaves need not end this one, which does by itself
        with suppress(RendezvousError):
            self._say([what[0], self._number, *what[1:]])

    def _say(self, what: list[Any]) -> None:
        self._store.put(f"{self._folder}/at/{self._me}", json.dumps(what), overwrite=True)

    def _wait(self) -> None:
        """The watchdog sees this as the step: who waits here would otherwise wait in there."""
        begun = self._clock()
        while True:
            told = {int(p): json.loads(text) for p, text in self._store.entries(f"{self._folder}/at").items()}
            for process, (what, number, *more) in sorted(told.items()):
                if what != "ready" and number == self._number:
                    return self._follow(process, what, more)
            if len(told) == self._num and all(number >= self._number for _, number, *_ in told.values()):
                return
            self._sleep(min(max(SHORTEST_S, SHARE * (self._clock() - begun)), self._longest_s))

    def _follow(self, process: int, what: str, more: list[Any]) -> None:
        self.ended = True
        phase.mark_ending()
        if what == "stops":
            self.stops = True
            return
        code, said = more
        raise OtherFailed(
            f"process {process} cannot go on: {said}\nNo step is possible without it, so all processes end here; its own output says more.",
            process,
            code,
        )


def _told(error: BaseException) -> tuple[int, str]:
    code, text = describe(error)
    return int(code), (text.strip().splitlines() or [type(error).__name__])[0][:500]
