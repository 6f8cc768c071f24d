"""The warning of bfloat16 parameters that their updates do not change: once in a run, and not for schedules."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.run.hooks.lost_updates import Intervals
from tests.support import small_runs

STEPS, EVERY = 10_000, 10
HALF = 2.0**-9


def reports(size, lost, steps=STEPS, intervals=None):
    """Returns the steps at which one leaf is reported. `size` and `lost` are functions of the step."""
    intervals = intervals or Intervals()
    return [
        step for step in range(EVERY, steps + 1, EVERY) if intervals.add(step, np.array([[size(step), lost(step)]]))
    ]


def schedule_reports(schedule, value=1.0, steps=STEPS):
    """Returns the reports for one parameter with updates of the schedule's size, which are lost below 1/512 of it."""
    sizes = np.broadcast_to(np.asarray(schedule(np.arange(steps + 1)), np.float64), steps + 1)
    return reports(lambda step: sizes[step], lambda step: sizes[step] * (sizes[step] < HALF * value), steps)


def test_stalled_leaf_is_reported_after_1000_steps():
    assert reports(lambda step: 1.0, lambda step: 1.0)[0] == 1000
    assert reports(lambda step: 1.0, lambda step: 0.92)[0] == 1000
    assert not reports(lambda step: 1.0, lambda step: 0.88)
    noise = np.random.default_rng(0).lognormal(0, 0.5, STEPS + 1)
    assert reports(lambda step: noise[step], lambda step: noise[step])[0] < 1600


def test_leaf_that_stalls_later_is_reported():
    fast, slow = (lambda step: np.exp(-step / 300)), (lambda step: max(np.exp(-step / 300), 1e-2))
    found = reports(slow, lambda step: slow(step) * (fast(step) < 1e-2))
    assert found and 2500 < found[0] < 6000


@pytest.mark.parametrize("steps", [2000, 6000, STEPS])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda n: optax.cosine_decay_schedule(4 * HALF, n),
        lambda n: optax.linear_schedule(4 * HALF, 0, n),
        lambda n: optax.linear_schedule(0, 2 * HALF, n),
        lambda n: optax.warmup_cosine_decay_schedule(0, 4 * HALF, n // 5, n),
        lambda n: optax.warmup_cosine_decay_schedule(0, 1.5 * HALF, n // 2, n),
        lambda n: optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(2 * HALF)], [n // 2]),
        lambda n: optax.constant_schedule(0.0),
    ],
    ids=["cosine", "linear decay", "linear warm-up", "warm-up and cosine", "long warm-up", "zero first", "zero"],
)
def test_schedules_are_not_reported(schedule, steps):
    assert not schedule_reports(schedule(steps), steps=steps)


def test_lost_updates_after_zero_are_reported():
    n = STEPS // 2
    schedule = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(HALF / 2)], [n])
    found = schedule_reports(schedule)
    assert found and n + 1000 <= found[0] < STEPS


def test_nonfinite_updates_are_no_evidence():
    assert not reports(lambda step: np.nan, lambda step: np.nan) and not reports(lambda step: np.inf, lambda step: 1)


def test_restored_intervals_continue():
    whole = reports(lambda step: 1.0, lambda step: 1.0)
    first = Intervals()
    reports(lambda step: 1.0, lambda step: 1.0, 700, first)
    second = Intervals(**json.loads(json.dumps(vars(first))))
    assert next(s for s in range(710, 2000, 10) if second.add(s, np.ones((1, 2)))) == whole[0]


def stalling():
    """Returns a task with a leaf that stalls, one that trains and one without a gradient."""
    init = lambda key: {"norm": {"scale": jnp.ones(8)}, "w": jnp.zeros(8), "unused": jnp.ones(8)}

    def loss(p, b, key):
        p = jax.tree.map(lambda x: x.astype(jnp.float32), p)
        return sk.mean((b["x"].astype(jnp.float32) ** 2 @ (p["norm"]["scale"] + p["w"])[:1]) + 0 * p["unused"].sum())

    return sk.Task(init, loss, optax.sgd(2.0**-14), train_data={"x": small_runs.X})


def train(tmp_path, steps, **changes):
    precision = {"params": "bfloat16"} | changes.pop("precision", {})
    logged = {"log": {"every_steps": 100, "progress": "plain"}, "checkpoint": {"every_steps": 1000}}
    return small_runs.train(tmp_path, stalling(), steps=steps, precision=precision, **logged | changes)


def test_run_warns_once_with_leaves_share_and_repair(tmp_path, capfd):
    train(tmp_path, 1000)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
    for words in ("step 1000", "1 of 3", "norm/scale", "100 %", "params: float32", "rounding: stochastic"):
        assert words in line
    train(tmp_path, 1200)
    assert "warning" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("precision", [{"params": "float32"}, {"rounding": "stochastic"}], ids=str)
def test_repairs_do_not_warn(tmp_path, capfd, precision):
    train(tmp_path, 1100, precision=precision)
    assert "warning" not in capfd.readouterr().out
