"""What a run adds to the metrics of a task: learning rate, gradient norm, tokens/s, memory, MFU, goodput."""

import dataclasses
import json
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.metrics import Goodput
from spmdkit.plan.machine import calibrate
from tests.support import small_runs

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
COSINE = {"name": "cosine_decay_schedule", "init_value": 0.1, "decay_steps": 8}


def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2)


def logged(folder, of_task, loss=loss_fn, train_data=X, tokens=None, **changes):
    """Returns the training records of a run by step."""
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss, of_task, train_data, tokens=tokens)
    values = {"steps": 6, "batch_size": 16, "checkpoint": {}, "log": {"every_steps": 1, "progress": "plain"}}
    small_runs.train(folder, task, **{**values, **changes})
    return {record["step"]: record for record in small_runs.lines(folder, "metrics.jsonl")}


def test_a_run_logs_rate_norm_memory_and_goodput(tmp_path, capfd):
    records = logged(tmp_path, lambda rate: optax.adam(rate), learning_rate=COSINE, mesh={"data": 2})
    schedule = optax.cosine_decay_schedule(0.1, 8)
    np.testing.assert_allclose([records[s]["learning_rate"] for s in records], [schedule(s - 1) for s in records], 1e-6)
    assert all(record["gradient_norm"] > 0 for record in records.values())
    assert "goodput" not in records[1] and 0 < records[6]["goodput"] <= 1 and records[6]["peak_memory_bytes"] > 2**20
    assert "tokens_per_s" not in records[6] and "mfu" not in records[6]  # no rates of this CPU were measured
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("step 6/6"))
    assert all(f"  {name} " in line for name in ("lr", "grad norm", "memory", "goodput"))


@pytest.mark.parametrize(
    ("optimizer", "settings", "expected"),
    [
        (lambda rate: optax.sgd(rate), {"learning_rate": 0.05}, 0.05),
        (None, {"optimizer": {"name": "adamw", "learning_rate": 0.02}}, 0.02),
        (optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(0.03)), {}, 0.03),
        (optax.sgd(0.1), {}, None),
    ],
)
def test_learning_rate_is_that_of_the_optimizer(tmp_path, optimizer, settings, expected):
    records = logged(tmp_path, optimizer, steps=2, **settings)
    assert records[2].get("learning_rate") == (None if expected is None else pytest.approx(expected))


def test_skipped_steps_do_not_move_the_learning_rate(tmp_path):
    bad = X.copy()
    bad[20] = np.nan  # in step 2
    settings = {"learning_rate": COSINE, "on_nonfinite": "skip", "data": {"shuffle": False}}
    records = logged(tmp_path, lambda rate: optax.sgd(rate), train_data=bad, steps=4, **settings)
    schedule = optax.cosine_decay_schedule(0.1, 8)
    assert [records[s]["learning_rate"] for s in (1, 3, 4)] == pytest.approx([float(schedule(n)) for n in (0, 1, 2)])


def test_a_metric_of_the_task_replaces_ours(tmp_path):
    def loss(params, batch, key):
        return loss_fn(params, batch, key), {"gradient_norm": sk.mean(jnp.full(len(batch), 7.0)), "mfu": sk.scalar(0.5)}

    records = logged(tmp_path, optax.sgd(0.1), loss=loss, steps=3)
    assert {(r["gradient_norm"], r["mfu"]) for r in records.values()} == {(7, 0.5)}


def test_tokens_are_counted_by_the_task(tmp_path):
    records = logged(tmp_path, optax.sgd(0.1), tokens=lambda batch: batch.size)
    assert records[6]["tokens_per_s"] == pytest.approx(3 * records[6]["examples_per_s"])
    for tokens, found in ((lambda batch: batch.sum(), "Task.tokens raised"), (lambda batch: 2.5, "returned float")):
        with pytest.raises((ConfigError, UserCodeError), match=found):
            logged(tmp_path / "wrong", optax.sgd(0.1), tokens=tokens)


def test_mfu_is_the_time_at_peak_over_that_of_a_step(tmp_path, monkeypatch):
    def start(program, *_):
        program.seconds_at_peak = 1e-6
        return lambda: None

    monkeypatch.setattr("spmdkit.run.trainer.start_plan_thread", start)
    record = logged(tmp_path, optax.sgd(0.1))[6]
    assert record["mfu"] == pytest.approx(1e-6 / record["step_time_s"])


def test_the_plan_sets_the_time_at_peak(tmp_path, monkeypatch):
    measured: Any = lambda target: (dataclasses.replace(target, calibrated="2026-11-27"), 0.0)
    monkeypatch.setattr(calibrate, "with_measured", measured)
    task = sk.Task(lambda key: {"w": jnp.zeros((3, 64))}, matrix_loss, optax.sgd(0.1), X)
    result = small_runs.train(tmp_path, task, steps=2, batch_size=16, eval={})
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    flops, peak = 2 * 2 * 16 * 3 * 64, plan["time"]["peak_flops_per_s"]  # forward, and the gradient of w
    assert result.program.seconds_at_peak == pytest.approx(flops / 2 / peak)  # of each of two devices


def matrix_loss(params, batch, key):
    return sk.mean(((batch @ params["w"] - 1) ** 2).sum(-1))


def test_columns_of_the_config_set_the_width(tmp_path, capfd):
    logged(tmp_path, optax.sgd(0.1), log={"every_steps": 1, "columns": 60})
    lines = capfd.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("step 6/6"))
    assert max(map(len, lines[start : start + 3])) <= 60 and "goodput" in "".join(lines[start : start + 3])


def test_goodput_is_the_share_of_steps_that_count():
    now = [100.0]
    goodput = Goodput(lambda: now[0])
    now[0] = 110.0
    assert goodput.add(5.0) == 0.5
    saved = dict(goodput.state)
    now[0] = 120.0
    assert goodput.add(10.0) == 0.75
    goodput.restore(saved)  # a rollback: these steps are repeated
    assert goodput.add(0.0) == 0.25
    later = Goodput(lambda: 140.0)  # another attempt
    later.restore(saved)
    assert later.add(15.0) == 0.5


def test_goodput_of_all_attempts_is_in_the_checkpoint(tmp_path):
    logged(tmp_path, optax.sgd(0.1), steps=3)
    states = []
    hook = sk.Hook("look", begin=lambda run, step, state: states.append(run.hook_runner.state()["logging"]))
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.sgd(0.1), X, hooks=[hook])
    begun = time.time()
    small_runs.train(tmp_path, task, steps=6, batch_size=16)
    assert states[0]["started"] < begun and states[0]["trained_s"] > 0
