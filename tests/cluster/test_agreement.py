"""The agreement under every order of messages that a seeded scheduler comes up with: no real time, no real network.
Each process is a thread, and each store access an atomic event."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdkit.cluster.agreement import Agreement
from spmdkit.cluster.store import MemoryStore
from spmdkit.errors import RendezvousError


class Scheduler:
    """Lets exactly one thread run at a time, chosen at random among those that have not ended."""

    def __init__(self, seed, weights):
        self.random, self.weights = random.Random(seed), weights
        self.baton = threading.Condition()
        self.turn, self.alive, self.time = None, set(range(len(weights))), 0.0

    def pick(self):
        choices = sorted(self.alive)
        self.turn = self.random.choices(choices, [self.weights[c] for c in choices])[0] if choices else None
        self.baton.notify_all()

    def pause(self, process):
        with self.baton:
            self.time += 0.001
            self.pick()
            assert self.baton.wait_for(lambda: self.turn == process, timeout=20)

    def run(self, bodies):
        errors = []

        def thread(process, body):
            with self.baton:
                assert self.baton.wait_for(lambda: self.turn == process, timeout=20)
            try:
                body()
            except Exception as error:  # noqa: BLE001 - raised again in `run`
                errors.append(error)
            with self.baton:
                self.alive.discard(process)
                self.pick()

        threads = [threading.Thread(target=thread, args=item, daemon=True) for item in enumerate(bodies)]
        for t in threads:
            t.start()
        with self.baton:
            self.pick()
        for t in threads:
            t.join(timeout=20)
            assert not t.is_alive(), "the processes wait for each other indefinitely"
        if errors:
            raise errors[0]


class SteppedStore(MemoryStore):
    """A MemoryStore that pauses before and after every access, where messages are on the way."""

    def __init__(self, shared, pause):
        self._shared, self._pause = shared, pause

    def __getattribute__(self, name):
        if name.startswith("_") or name not in ("put", "try_get", "entries"):
            return object.__getattribute__(self, name)

        def access(*args, **kwargs):
            self._pause()
            result = getattr(self._shared, name)(*args, **kwargs)
            self._pause()
            return result

        return access


def simulate(seed, num_processes, num_steps, lag, requests, skew=1.0, step_s=0.0):
    """Returns for each process the steps at which it got True. `requests`: steps by process, or the first of a standing
    request that ends with the first True."""
    rng = random.Random(seed)
    weights = [skew ** rng.uniform(-1, 1) for _ in range(num_processes)]
    scheduler, shared = Scheduler(seed, weights), MemoryStore()
    true_at = [[] for _ in range(num_processes)]

    def body(process):
        def pause():
            scheduler.pause(process)

        agreement = Agreement(
            SteppedStore(shared, pause), "a", process, timeout_s=1e9,
            clock=lambda: scheduler.time, sleep=lambda s: pause(),
        )  # fmt: skip

        def run():
            for step in range(1, num_steps + 1):
                wanted = requests.get(process, ())
                request = step in wanted if not isinstance(wanted, int) else step >= wanted and not true_at[process]
                if agreement.at(step, request, lag):
                    true_at[process].append(step)
                scheduler.time += step_s
                pause()

        return run

    scheduler.run([body(p) for p in range(num_processes)])
    return true_at


SEEDS = st.integers(0, 2**20)
"""Of the scheduler: the order of all messages."""


@given(seed=SEEDS)
def test_every_process_gets_true_at_the_same_steps(seed):
    rng = random.Random(seed)
    num_processes, num_steps, lag = rng.choice([2, 3, 4]), 40, rng.choice([0, 1, 2, 5])
    requests = {p: set(rng.sample(range(1, 41), rng.choice([0, 1, 3, 20]))) for p in range(num_processes)}
    skew, step_s = rng.choice([1, 3, 30]), rng.choice([0.0, 0.005, 1.0])
    true_at = simulate(seed, num_processes, num_steps, lag, requests, skew=skew, step_s=step_s)
    assert all(steps == true_at[0] for steps in true_at), true_at
    if not any(requests.values()):
        assert true_at[0] == []


@given(seed=SEEDS, requester=st.integers(0, 2))
def test_one_request_is_decided_once_and_soon(seed, requester):
    true_at = simulate(seed, 3, 60, lag=2, requests={requester: {10}}, step_s=1.0)
    assert true_at[0] == true_at[1] == true_at[2]
    assert len(true_at[0]) == 1
    assert true_at[0][0] > 10
    if requester == 0:  # one second per step: decided immediately, for the step after the horizon
        assert true_at[0][0] in (13, 14)


@given(seed=SEEDS, requests=st.sampled_from([{0: 10}, {2: 10}, {0: 10, 1: 12}, {1: 10, 2: 10}]))
def test_requests_before_the_decision_share_it(seed, requests):
    true_at = simulate(seed, 3, 60, lag=2, requests=requests, step_s=1.0)
    assert len(true_at[0]) == 1
    assert true_at[0] == true_at[1] == true_at[2]


def test_repeated_request_is_decided_repeatedly():
    true_at = simulate(1, 3, 60, lag=1, requests={2: set(range(1, 61))}, step_s=1.0)
    assert len(true_at[0]) > 5
    assert true_at[0] == true_at[1] == true_at[2]


def test_fast_steps_cost_few_messages():
    """1 ms steps: the horizon is extended about every 50 steps, not every step."""
    accesses, now = [], [0.0]

    store = SteppedStore(MemoryStore(), lambda: accesses.append(1))  # before and after each
    agreement = Agreement(store, "a", 0, timeout_s=1, clock=lambda: now[0])
    for step in range(1, 1001):
        agreement.at(step, False, 2)
        now[0] += 0.001
    assert len(accesses) / 2 < 1000 / 50 * 2 * 1.6


def test_follower_without_process_0_times_out():
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    agreement = Agreement(MemoryStore(), "a", 3, timeout_s=60, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(
        RendezvousError, match="process 3 waited 60 s at step 7 for process 0, which has started no step"
    ):
        agreement.at(7, False, 2)
    assert 60 <= now[0] < 61


def test_skipped_step_is_an_error():
    agreement = Agreement(MemoryStore(), "a", 0, timeout_s=1)
    agreement.at(5, False, 2)
    with pytest.raises(ValueError, match="at step 7 after step 5"):
        agreement.at(7, False, 2)
