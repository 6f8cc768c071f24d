"""The algorithm over threads: equal to one device without staleness, exactly once under kills, backup workers,
staleness."""

import argparse
import importlib.util
import itertools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import RendezvousError
from spmdkit.foundation.deadline import Deadline
from spmdkit.parameter_server.coordinator import MAX_FAILURES
from spmdkit.parameter_server.messages import Rules
from tests.support.parameter_servers import MAX_RECORDS, Counting, Job, Killed, of_task, relative

ROWS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


def model(optimizer):
    """A layer with dropout by example keys, and statistics in the model state."""

    def init(key):
        w = jax.random.normal(key, (3, 4))
        return sk.Variables(
            {"w": w, "v": jnp.ones((4, 1)), "b": jnp.zeros(())}, {"mean": jnp.zeros(3), "steps": jnp.int32(0)}
        )

    def loss_fn(params, state, batch, key):
        drop = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (4,)).astype(jnp.float32))(sk.example_keys())
        hidden = jnp.tanh((batch["x"] - state["mean"]) @ params["w"]) * drop
        error = (hidden @ params["v"])[:, 0] + params["b"] - batch["x"][:, 0] ** 2
        mean = 0.9 * state["mean"] + 0.1 * jax.lax.pmean(batch["x"].mean(0), ("replica", "data"))
        return sk.mean(error**2), {"size": sk.mean(jnp.abs(error))}, {"mean": mean, "steps": state["steps"] + 1}

    return sk.Task(init, loss_fn, optimizer, train_data={"x": ROWS})


def config(**changes):
    values = {"task": "inline.py:task", "batch_size": 8, "steps": 12, "devices": "cpu:2", "mesh": {"data": 1}}
    return sk.Config(**{**values, "checkpoint": None, **changes})


def alone(program, steps):
    """Returns the state and the losses of training on one device."""
    state, losses = program.init(), []
    for _, batch in program.batches(1, steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    "servers, changes",
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (3, {"mesh": {"data": 2}, "microbatches": 2, "clip_norm": 0.5, "ema": 0.9}),
    ],
    ids=["one server", "three, on a mesh"],
)
def test_one_worker_without_staleness_equals_one_device(servers, changes):
    asked = config(**changes)
    job, program = of_task(asked, model(optax.adam(0.05)), Rules(12, ema=asked.ema), servers=servers)
    state = job.run()
    expected, losses = alone(program, 12)
    assert [record["staleness"] for record in job.records] == [0] * 12
    assert [record["batch"] for record in job.records] == list(range(1, 13))
    np.testing.assert_allclose([record["loss"] for record in job.records], losses, rtol=1e-5)
    assert relative(state.params, expected.params) < 1e-5
    assert relative(state.opt_state, expected.opt_state) < 1e-5
    assert relative(state.model_state, expected.model_state) < 1e-6
    assert asked.ema is None or relative(state.ema, expected.ema) < 1e-5
    assert int(state.step) == 12


def test_two_synchronous_workers_equal_twice_the_batch():
    """Batches of 6 of 60 rows: two in a row are one of 12. Rows are cut off by a mask of the task, so that counts
    weigh."""

    def loss_fn(params, batch, key):
        counts = batch["x"][:, 0] > 0
        return sk.mean((batch["x"] @ params["w"] - batch["x"][:, 1]) ** 2, counts.astype(jnp.float32))

    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.sgd(0.1), train_data={"x": ROWS})
    job, _ = of_task(config(batch_size=6), task, Rules(8, aggregate=2), workers=2)
    state = job.run()
    _, program = of_task(config(batch_size=12), task, Rules(8))
    assert relative(state.params, alone(program, 8)[0].params) < 1e-5
    assert {record["worker"] for record in job.records} == {0, 1} and len(job.records) == 16


def test_slowest_of_three_workers_is_dropped():
    job = Job(Rules(30, aggregate=2), workers=3, seconds=lambda worker: 0.05 if worker == 2 else 0.002)
    state = job.run()
    counts = -np.asarray(state.params["a"])
    assert int(state.step) == 30 and np.isclose(counts.sum(), 30)  # means of two: each batch counts a half
    assert job.last.dropped.get("late", 0) >= 1, job.last
    assert job.last.progress[0] > 5 * job.last.progress.get(2, 0)


@pytest.mark.parametrize(
    "task, seeds", [("line", 1), *(pytest.param(task, 3, marks=pytest.mark.slow) for task in ("line", "digits"))]
)
def test_two_stale_workers_reach_the_loss_of_sgd(task, seeds):
    """After as many applied updates: `benchmarks/parameter_server.py converge`."""
    path = Path(__file__).parents[2] / "benchmarks" / "parameter_server.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_parameter_servers", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    found = benchmark.converge(argparse.Namespace(tasks=[task], seeds=seeds, transport="threads"))
    assert len(found[task]["seeds"]) == seeds and benchmark.missed("converge", found) == [], found
    assert benchmark.missed("converge", {"line": {"ratio": 1.06, "seeds": [{"stale": 0.4}]}})


def test_a_slow_worker_does_not_slow_the_other():
    """Its rate falls by less than a tenth: benchmarks/parameter_server.py."""
    job = Job(Rules(60), workers=2, overlap=True, seconds=lambda worker: 0.1 if worker else 0.02)
    job.run()
    assert job.last.progress[0] > 2.5 * job.last.progress[1] > 0, job.last.progress
    stale = sum(num for staleness, num in job.last.histogram.items() if staleness)
    assert sum(job.last.histogram.values()) == 60 and stale >= 30, job.last.histogram


def at_their_last(coordinator):
    """Returns the workers whose death now would be one too many in a row without a gradient, and end the job: by
    chance, among 20 in 400 updates."""
    idle = [n for n, start in coordinator._progress_at_start.items() if coordinator._progress.get(n, 0) <= start]
    return [coordinator._running.get(n) for n in idle if coordinator._without_push[n] == MAX_FAILURES - 1]


@pytest.mark.parametrize("workers, steps", [(3, 400), pytest.param(5, 3000, marks=pytest.mark.slow)])
def test_kills_and_lost_replies_apply_nothing_twice(workers, steps):
    """20 workers and 5 servers are killed at random moments, and one answer in ten is lost."""
    dice, goes_back, dead = random.Random(workers), [], []
    kills = sorted(dice.sample(range(10, steps - 40), 25))
    plan = [(step, "server" if i % 5 == 4 else "worker") for i, step in enumerate(kills)]

    def at(job, applied):
        if plan and applied >= plan[0][0] and (len(job.transport.workers) - len(dead)) == workers:
            if plan[0][1] == "server":
                dice.choice(job.transport.servers).kill()
                goes_back.append(int(job.saved[0].step))
            else:
                living = [thread for thread in job.transport.workers if thread.ended() is None and thread not in dead]
                living = [thread for thread in living if thread not in at_their_last(job.coordinator)]
                if not living:
                    return
                dead.append(dice.choice(living))
                dead[-1].kill()
            plan.pop(0)

    is_lost = lambda method: method in ("push", "take_batch", "pull") and dice.random() < 0.1
    job = Job(
        Rules(steps), workers=workers, servers=2, seconds=lambda worker: 0.004, is_lost=is_lost, overlap=True, saves=20
    )
    state = job.run(at=at)
    for leaf in state.params.values():
        counts = -np.asarray(leaf)
        assert set(np.unique(counts)) <= {0.0, 1.0}, np.unique(counts)  # no batch twice, so no push twice
        assert counts.sum() == steps
    lost = job.events_named("worker_lost")
    assert len(lost) == 20 == len(dead) and not plan, (len(lost), plan)
    # The newest checkpoint each time. On a busy machine one kill may be noticed twice, which restores it twice.
    without_repeats = lambda steps: [step for step, _ in itertools.groupby(steps)]
    restored = [event["step"] for event in job.events_named("servers_restored")]
    assert len(restored) >= 5 and without_repeats(restored) == without_repeats(goes_back)
    # A server may have died between a status and a snapshot, and its records with it.
    applied = [record["batch"] for record in job.records]
    assert len(applied) == len(set(applied)) <= steps
    # Every batch that was given out was applied, or is in the hands of a worker: none is left out.
    assert np.flatnonzero(counts)[-1] <= steps + 2 * workers + 2 < MAX_RECORDS


def test_worker_that_always_dies_ends_the_run():
    class Dies(Counting):
        def __call__(self, *args):
            raise Killed

    job = Job(Rules(10), gradient_fn=lambda number: Dies())
    with pytest.raises(sk.SpmdkitError, match="worker 0 has died 3 times in a row before one of its gradients"):
        job.run()


class Waits:
    """A worker whose process never starts."""

    where, ended = "", lambda self: None


def test_run_ends_when_no_worker_starts(monkeypatch):
    job = Job(Rules(10), workers=2)
    monkeypatch.setattr(job.transport, "worker", lambda *args: Waits())
    monkeypatch.setattr(job.transport, "why_waiting", lambda: "0 of the 2 CPUs of the Ray cluster are free")
    job.coordinator.start()
    assert job.coordinator.wait_for_workers(0.1) == [0, 1]
    job.coordinator.install()
    assert not job.coordinator.watch().events
    monkeypatch.setattr(job.coordinator, "_start_by", Deadline(0))
    with pytest.raises(RendezvousError, match="no worker has started within 600 s: 0 of the 2 CPUs of the"):
        job.coordinator.watch()


def test_worker_that_started_is_not_late(monkeypatch):
    job = Job(Rules(10))
    job.coordinator.install()
    job.coordinator.start()
    assert job.coordinator.wait_for_workers(10) == [] and job.coordinator.watch().events
    monkeypatch.setattr(job.coordinator, "_start_by", Deadline(0))
    assert job.coordinator._start(0) and job.coordinator.watch()
    job.transport.close()


def test_run_ends_when_a_server_does_not_start(monkeypatch):
    job = Job(Rules(10), servers=2)
    monkeypatch.setattr(job.transport.servers[1], "call_async", lambda *args: job.transport.servers[1]._unavailable)
    monkeypatch.setattr(job.coordinator, "_start_by", Deadline(0))
    with pytest.raises(RendezvousError, match="server 1 has not started within 600 s"):
        job.coordinator.wait_for_workers(0.1)
