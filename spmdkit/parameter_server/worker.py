"""A worker pulls parameters, computes a gradient and pushes it, until every server has applied all updates.

With `overlap` the worker pushes the last gradient and pulls the next parameters while it computes the next gradient.
Every gradient is then at least one update stale. Without it, a worker waits for its push, and a single worker has zero
staleness.

A worker is stateless. If it dies, only its current computation is lost, and its replacement has a new incarnation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from spmdkit.foundation.timeouts import WORKER_LONGEST_PAUSE_S
from spmdkit.parameter_server.gradient import Gradient
from spmdkit.parameter_server.messages import PulledParams, Push, Response
from spmdkit.parameter_server.partition import Arrays
from spmdkit.parameter_server.transport import Endpoint, call, start_call


class GradientFunction(Protocol):
    """Computes gradients: `GradientStep`, or a substitute in tests."""

    def batch(self, number: int) -> Any: ...

    def place(self, params: Arrays, model_state: Arrays | None) -> tuple[Any, Any]: ...

    def __call__(self, params: Any, model_state: Any, number: int, batch: Any) -> Gradient: ...


class NonFiniteGradient(Exception):
    """The loss, gradient or a metric is not finite, and the policy is to stop."""


class FencedError(Exception):
    """A newer incarnation of this worker runs, so the server rejects pushes of this one."""


class ReadyBatch(NamedTuple):
    """All inputs of a computation, on the devices."""

    number: int
    batch_number: int
    generation: int
    versions: tuple[int, ...]
    batch: Any
    params: Any
    model_state: Any
    old_state: Arrays | None


@dataclass(frozen=True)
class Worker:
    """One incarnation of a worker.

    Attributes:
        endpoints: the servers; the first assigns batches.
        owned: the paths of the leaves of each server.
        policies: `loss`, `gradient`, `metrics` -> action for non-finite values.
        overlap: push and pull while the next gradient is computed.
    """

    number: int
    incarnation: int
    endpoints: Sequence[Endpoint]
    owned: Sequence[Sequence[str]]
    gradient_fn: GradientFunction
    policies: dict[str, str]
    overlap: bool = True
    stopped: Callable[[], bool] = lambda: False

    def run(self) -> int:
        """Runs until every server has applied all updates, or a stop. Returns the number of gradients sent. Raises
        NotFinite, Fenced, or Unavailable if it is stopped while a server is unreachable."""
        self._call("register", self.number, self.incarnation)
        with ThreadPoolExecutor(1, thread_name_prefix=f"worker-{self.number}") as background:
            return self._overlapping(background) if self.overlap else self._waiting()

    def _waiting(self) -> int:
        sent, ready = 0, self._fetch(0)
        while ready is not None:
            newer_than = self._push(ready, self._compute(ready))
            sent += 1
            ready = self._fetch(sent, newer_than)
        return sent

    def _overlapping(self, background: ThreadPoolExecutor) -> int:
        def push_and_fetch(ready: ReadyBatch, push: Gradient, number: int) -> ReadyBatch | None:
            self._push(ready, push)
            return self._fetch(number)

        sent, ready = 0, self._fetch(0)
        following: Future[ReadyBatch | None] = background.submit(self._fetch, 1)
        while ready is not None:
            computed = self._compute(ready)
            upcoming = following.result()  # pulled before this gradient was pushed
            following = background.submit(push_and_fetch, ready, computed, sent + 2)
            sent, ready = sent + 1, upcoming
        following.result()
        return sent

    def _fetch(self, number: int, newer_than: Sequence[tuple[int, int]] = ()) -> ReadyBatch | None:
        """Returns the inputs of push `number`; None if no more gradients are needed."""
        wait_s, gradient_fn = 0.001, self.gradient_fn
        while not self.stopped():
            pulled = self._pull(newer_than or [(-1, -1)] * len(self.endpoints))
            if pulled is not None and all(part.done for part in pulled):
                return None
            batch = None if pulled is None else self._call("take_batch", self.number, self.incarnation, number)
            if pulled is None or batch is None:
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, WORKER_LONGEST_PAUSE_S)
                continue
            params = {path: x for part in pulled for path, x in part.params.items()}
            state, versions = pulled[0].model_state, tuple(part.version for part in pulled)
            placed = gradient_fn.place(params, state)
            return ReadyBatch(number, batch, pulled[0].generation, versions, gradient_fn.batch(batch), *placed, state)
        return None

    def _call(self, method: str, *args: Any) -> Any:
        """Returns the response of the first server."""
        return call(self.endpoints[0], method, *args, give_up=self.stopped)

    def _pull(self, newer_than: Sequence[tuple[int, int]]) -> list[PulledParams] | None:
        """Returns the parts of all servers; None if a server has no newer part, or generations differ."""
        parts = self._of_all("pull", [(known,) for known in newer_than])
        if any(part is None for part in parts) or len({part.generation for part in parts}) > 1:
            return None
        return parts

    def _of_all(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls all servers concurrently and returns their responses."""
        started = [start_call(endpoint, method, *values) for endpoint, values in zip(self.endpoints, args, strict=True)]
        return [response(self.stopped) for response in started]

    def _compute(self, ready: ReadyBatch) -> Gradient:
        gradient = self.gradient_fn(ready.params, ready.model_state, ready.batch_number, ready.batch)
        for what in gradient.not_finite:
            if self.policies.get(what, "stop") == "stop":
                raise NonFiniteGradient(
                    f"{what} of batch {ready.batch_number} is not finite on worker {self.number}. It was not applied. "
                    "Lower the learning rate, set clip_norm, or on_nonfinite: skip."
                )
        return gradient

    def _push(self, ready: ReadyBatch, found: Gradient) -> list[tuple[int, int]]:
        """Returns each server's (generation, version) that the next pull must exceed, if the gradient is held there."""
        skips, pushes = any(self.policies.get(what) == "skip" for what in found.not_finite), []
        for server, paths in enumerate(self.owned):
            report: dict[str, Any] | None = None
            if server == 0:
                report = {"metrics": found.metrics}
                if found.model_state is not None:
                    report["state"] = (ready.old_state or found.model_state, found.model_state)
            gradient = None if skips else {path: found.arrays[path] for path in paths}
            where = (ready.generation, ready.versions[server], ready.batch_number)
            pushes.append(
                Push(self.number, self.incarnation, ready.number, *where, gradient, found.loss, found.weight, report)
            )
        responses: list[Response] = self._of_all("push", [(push,) for push in pushes])
        if any(response.outcome == "fenced" for response in responses):
            raise FencedError(f"worker {self.number} in its incarnation {self.incarnation} is considered dead")
        return [
            (ready.generation, version) if response.outcome == "pending" else (-1, -1)
            for response, version in zip(responses, ready.versions, strict=True)
        ]
