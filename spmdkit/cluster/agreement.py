"""Agreement on a step: every process gets True at the same step, whichever process requested it.

Process 0 leads. It publishes a *horizon* H with the promise "every decision from now on is for a step after H", and the
number of decisions so far. A follower passes step t only after it has read a horizon H >= t. Hence:

  - while process 0 decides, no process has passed a step after the published H. The decision for step D = H + 1
    therefore precedes every process's step D, and process 0 has not passed D either (H >= its own step always holds);
  - a follower at step D has not yet read a horizon that covers D, so it reads. A board with a horizon >= D was written
    after decision D, so the follower reads D and returns True at exactly that step.

H is never less than `step + lag`, so processes that run ahead do not wait. When steps are fast, process 0 extends the
horizon only every `AGREEMENT_INTERVAL_S` seconds. A request carries the number of decisions at the time of the request;
a request with an older number is already satisfied.

Wire, per name and every max(1, AGREEMENT_INTERVAL_S / step time) steps: process 0 one put and one listing, each
follower one read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from spmdkit.cluster.store import Store
from spmdkit.errors import RendezvousError
from spmdkit.foundation import phase
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import AGREEMENT_INTERVAL_S, EXCHANGE_S

MAX_STEPS_AHEAD = 1024


class Agreement:
    """One decision per step that is the same on all processes. Process 0 leads, the others follow."""

    def __init__(
        self,
        store: Store,
        folder: str,
        process_index: int,
        *,
        timeout_s: float = EXCHANGE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._store, self._folder, self._process_index = store, folder, process_index
        self._timeout_s = timeout_s
        self._clock, self._sleep = clock, sleep
        self._step: int | None = None
        self._horizon: int | None = None
        self._num_decided = 0  # number of decisions that this process knows
        self._ahead: list[int] = []  # known decisions for later steps, in order
        self._requested: int | None = None  # followers: the decision number of their last request in the store
        self._stride = 1  # process 0: steps between extensions of the horizon
        self._extended: tuple[float, int] | None = None

    def at(self, step: int, request: bool, lag: int) -> bool:
        """Returns whether `step` is a decided step, the same on every process. Called at every step in sequence."""
        if self._step is not None and step != self._step + 1:
            raise ValueError(
                f"agreement {self._folder!r} was called at step {step} after step {self._step}. Every process calls it "
                "at every step in turn. Use another name for another loop."
            )
        self._step = step
        if self._process_index == 0:
            self._lead(step, request, lag)
        else:
            self._follow(step, request)
        if self._ahead and self._ahead[0] == step:
            del self._ahead[0]
            return True
        return False

    def _lead(self, step: int, request: bool, lag: int) -> None:
        horizon = step - 1 if self._horizon is None else self._horizon
        due = self._horizon is None or horizon <= step + lag
        must_decide = False
        if not self._ahead:  # a later decision satisfies every request made before it
            must_decide = request or (due and self._has_requests())
        if must_decide:
            decision = max(horizon, step) + 1
            self._store.put(f"{self._folder}/decisions/{self._num_decided}", str(decision))
            self._ahead.append(decision)
            self._num_decided += 1
        if due:
            horizon = step + lag + self._next_stride(step)
        if due or must_decide:
            self._horizon = horizon
            self._store.put(f"{self._folder}/board", f"{horizon} {self._num_decided}", overwrite=True)

    def _has_requests(self) -> bool:
        return bool(self._store.entries(f"{self._folder}/requests/{self._num_decided}"))

    def _next_stride(self, step: int) -> int:
        """Returns the number of steps until the next extension: about AGREEMENT_INTERVAL_S at the current step time."""
        now = self._clock()
        if self._extended is not None:
            last_time, last_step = self._extended
            step_s = max((now - last_time) / (step - last_step), 1e-9)
            self._stride = max(1, min(int(AGREEMENT_INTERVAL_S / step_s), 2 * self._stride, MAX_STEPS_AHEAD))
        self._extended = (now, step)
        return self._stride

    def _follow(self, step: int, request: bool) -> None:
        if self._horizon is None or step > self._horizon:
            with phase.waiting("process 0"):
                self._read_until(step)
        if request and not self._ahead and self._requested != self._num_decided:
            self._store.put(f"{self._folder}/requests/{self._num_decided}/{self._process_index}", str(step))
            self._requested = self._num_decided

    def _read_until(self, step: int) -> None:
        """Waits for a horizon that covers `step`."""
        deadline, pause = Deadline(self._timeout_s, self._clock), 0.0005
        while True:
            board = self._store.try_get(f"{self._folder}/board")
            if board is not None:
                self._horizon, num_decided = (int(word) for word in board.split())
                for number in range(self._num_decided, num_decided):
                    decision = self._store.try_get(f"{self._folder}/decisions/{number}")
                    assert decision is not None, "a decision is stored before the board counts it"
                    self._ahead.append(int(decision))
                self._num_decided = num_decided
                if step <= self._horizon:
                    return
            if deadline.expired:
                state = "has started no step" if self._horizon is None else f"allows steps up to {self._horizon}"
                raise RendezvousError(
                    f"process {self._process_index} waited {self._timeout_s:g} s at step {step} for process 0, which "
                    f"{state}. All processes must run the same steps; process 0 is stuck or left its loop early. "
                    f"See the output of process 0, and start all processes again."
                )
            self._sleep(pause)
            pause = min(2 * pause, 0.05)
