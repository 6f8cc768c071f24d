"""In-process servers and workers that can be killed, and a model with parameters that count applied batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.config import replace_keys
from spmdkit.parameter_server.coordinator import Coordinator
from spmdkit.parameter_server.gradient import Gradient, GradientStep, server_optimizer, synchronous
from spmdkit.parameter_server.messages import Rules
from spmdkit.parameter_server.partition import owners, shard, to_arrays
from spmdkit.parameter_server.server import Server
from spmdkit.parameter_server.threads import Threads
from spmdkit.parameter_server.transport import Endpoint, Unavailable
from spmdkit.parameter_server.worker import Worker
from spmdkit.program.program import Program
from spmdkit.step import state as states

MAX_RECORDS = 4096
"""Number of batches that the counting model distinguishes."""


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


class Counting:
    """Gradients with a one at the index of the batch: with plain SGD at rate 1, `-params[batch]` is how often that
    batch was applied."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    def batch(self, number: int) -> Any:
        return number

    def place(self, params: Any, model_state: Any) -> tuple[Any, Any]:
        return params, model_state

    def __call__(self, params: Any, model_state: Any, number: int, batch: Any) -> Gradient:
        time.sleep(self.seconds)
        one = np.zeros(MAX_RECORDS, np.float32)
        one[number] = 1
        return Gradient({"a": one, "b": one.copy()}, 0.5, 1.0, {}, (), None)


COUNTS = {"a": jnp.zeros(MAX_RECORDS), "b": jnp.zeros(MAX_RECORDS)}


def counting_state(step: int = 0, params: Any = COUNTS) -> states.TrainState:
    made = states.create(params, None, optax.with_extra_args_support(optax.sgd(1.0)), 0, None)
    return made.replace(step=jnp.int32(step))


class Killed(Unavailable):
    """Raised in the thread of a killed worker at its next call to a server."""


class FailingServer:
    """A server that can be killed. The next call fails; the one after it reaches a new server without a state."""

    def __init__(self, make: Callable[[], Server], is_lost: Callable[[str], bool]):
        self._make, self._is_lost, self._server = make, is_lost, make()

    def kill(self) -> None:
        self._server = None

    def call_async(self, method: str, *args: Any) -> Callable[[], Any]:
        if (server := self._server) is None:
            self._server = self._make()
            return self._unavailable
        value = getattr(server, method)(*args)
        return self._unavailable if self._is_lost(method) or server is not self._server else lambda: value

    def _unavailable(self) -> Any:
        raise Unavailable("the server has died, or its response is lost")


class FailingThreads(Threads):
    """Transport by threads. Servers and workers can be killed, and responses to calls with `loses(method)` are lost."""

    def __init__(self, *args: Any, is_lost: Callable[[str], bool] = lambda method: False):
        super().__init__(*args)
        self.servers, self._is_lost = list[FailingServer](), is_lost

    def server(self, number: int) -> Endpoint:
        self.servers.append(FailingServer(lambda: self.make_server(number), self._is_lost))
        return self.servers[-1]

    def worker(self, number: int, incarnation: int, endpoints: Any) -> Any:
        """Returns a worker with a `kill()` that takes effect before or after any call to a server."""
        killed = threading.Event()

        class Watched:
            def __init__(self, endpoint: Endpoint):
                self._endpoint = endpoint

            def call_async(self, method: str, *args: Any) -> Callable[[], Any]:
                for call in (lambda: None, lambda: self._endpoint.call_async(method, *args)):
                    answer = call()
                    if killed.is_set():
                        raise Killed
                return answer

        made = super().worker(number, incarnation, [Watched(endpoint) for endpoint in endpoints])
        made.kill = killed.set
        return made


class Job:
    """Servers, workers and their coordinator over the threads transport.

    Args:
        seconds: worker -> duration of a gradient, for the counting model.
        saves: updates between two checkpoints, which are stored in memory.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        servers: int = 1,
        workers: int = 1,
        state: Any = None,
        optimizer: Any = None,
        gradient_fn: Callable[[int], Any] | None = None,
        seconds: Callable[[int], float] = lambda worker: 0.0,
        overlap: bool = False,
        is_lost: Callable[[str], bool] = lambda method: False,
        partition: Any = "greedy",
        saves: int = 10,
    ):
        self.optimizer = optax.with_extra_args_support(optax.sgd(1.0)) if optimizer is None else optimizer
        self.saved: tuple[Any, Any] = (counting_state() if state is None else state, None)
        self.steps, self.every = rules.steps, saves
        params = abstract(self.saved[0].params)
        self.owned = owners(params, servers, partition)
        make_server = lambda number: Server(self.optimizer, shard(params, self.owned, number), rules, donate=False)
        paths = [[p for p, owner in self.owned.items() if owner == number] for number in range(servers)]
        policies = {"loss": "stop", "gradient": "stop", "metrics": "stop"}
        gradient_fn = gradient_fn or (lambda number: Counting(seconds(number)))

        def make_worker(number: int, incarnation: int, endpoints: Any, stopped: Any) -> Worker:
            return Worker(number, incarnation, endpoints, paths, gradient_fn(number), policies, overlap, stopped)

        self.transport = FailingThreads(make_server, make_worker, is_lost=is_lost)
        self.coordinator = Coordinator(self.transport, self.optimizer, self.owned, servers, workers, lambda: self.saved)
        self.records: list[dict[str, Any]] = []
        self.events: list[Any] = []
        self.last: Any = None

    def run(self, limit_s: float = 60, at: Callable[[Job, int], None] = lambda job, applied: None) -> Any:
        """Returns the final state. `at` is called with the number of updates that all servers have applied."""
        begin, saved_at = time.monotonic(), 0
        try:
            self.coordinator.install()
            self.coordinator.start()
            while True:
                assert time.monotonic() - begin < limit_s, (self.last, self.events[-5:])
                self.last = stats = self.coordinator.watch()
                self.events += stats.events
                if stats.restored_updates is not None:
                    self.records = [record for record in self.records if record["step"] <= stats.restored_updates]
                    saved_at = stats.restored_updates
                self.records += stats.records
                if stats.applied >= self.steps and (end := self.coordinator.snapshot()) is not None:
                    return end[0]
                if stats.applied >= saved_at + self.every and (found := self.coordinator.snapshot()) is not None:
                    self.saved, saved_at = found, int(found[0].step)
                at(self, stats.applied)
                time.sleep(0.002)
        finally:
            self.transport.close()

    def events_named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


def of_task(config: sk.Config, task: sk.Task, rules: Rules, **options: Any) -> tuple[Job, Program]:
    """Returns the job of a task, and the task's program without servers."""
    program = Program(replace_keys(synchronous(config), {"mesh": {}}), task, jax.devices()[:1])
    devices = jax.devices()[: config.mesh.data or 1]
    gradient_fn = lambda number: GradientStep(config, task, devices)
    optimizer = server_optimizer(config, task)
    return Job(rules, state=program.init(), optimizer=optimizer, gradient_fn=gradient_fn, **options), program


def relative(found: Any, expected: Any) -> float:
    """Returns the largest difference of two trees over leaves, relative to the larger of the leaf's norm and 0.001."""
    error = lambda x, y: float(np.linalg.norm(np.asarray(x) - np.asarray(y)) / max(np.linalg.norm(np.asarray(y)), 1e-3))
    found, expected = to_arrays(found), to_arrays(expected)
    assert found.keys() == expected.keys()
    return max(error(found[path], expected[path]) for path in found)
