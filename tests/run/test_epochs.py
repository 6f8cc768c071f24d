"""`epochs` instead of `steps`, and the epoch in the metrics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.config import load_config
from spmdkit.data import Schedule, StreamSchedule
from spmdkit.errors import ConfigError
from tests.support import small_runs
from tests.support.streams import exact


@pytest.mark.parametrize("skipped,steps", [((), 9), (((2, 3), (8, 8)), 6), (((9, 12),), 8)])
def test_steps_of_epochs_are_counted_without_skipped_batches(skipped, steps):
    schedule = Schedule(250, 96, drop_remainder=False, skipped=skipped)
    assert schedule.steps_of(3) == steps and schedule.epoch(steps) == 2 and schedule.epoch(steps + 1) >= 3
    assert Schedule(250, 96).steps_of(3) == 6


def test_epochs_train_whole_passes_and_continue_with_more(tmp_path):
    first = small_runs.train(tmp_path / "a", steps=None, epochs=2, batch_size=64)
    lines = small_runs.lines(tmp_path / "a", "metrics.jsonl")
    assert [(x["step"], x["epoch"]) for x in lines if "split" not in x] == [(1, 0.25), (5, 1.25), (8, 2.0)]
    assert not any("epoch" in x for x in lines if "split" in x) and first.program.config.steps == 8
    assert load_config(tmp_path / "a/run/config.yaml").steps == 8
    more = small_runs.train(tmp_path / "a", steps=None, epochs=3, batch_size=64)
    whole = small_runs.train(tmp_path / "b", steps=12, batch_size=64)
    assert more.run.step == 12 and small_runs.steps(tmp_path / "a") == [1, 5, 8, 10, 12]
    jax.tree.map(np.testing.assert_array_equal, more.state.params, whole.state.params)


@pytest.mark.parametrize(
    "given,text",
    [
        ({"epochs": 3, "steps": 100}, "epochs: is 3, and steps is 100. A run has one length"),
        ({"steps": None}, "steps: is null, and so is epochs. A run has one of them"),
        ({"epochs": 3, "sync": {"parameter_server": {}}}, "Set steps."),
    ],
)
def test_one_length_of_a_run(given, text):
    with pytest.raises(ConfigError) as error:
        sk.Config(task="a.py:task", **given)
    assert text in str(error.value)


def test_epochs_of_a_stream_are_refused():
    with pytest.raises(ConfigError, match=r"epochs is 2, and train_data is a stream.* Set steps"):
        StreamSchedule(16, "train_data", True).steps_of(2)


def test_a_stream_reports_completed_epochs(tmp_path):
    task = small_runs.line_task()
    loss_fn = lambda params, batch, key: sk.mean((params["w"][0, 0] * batch["id"].astype(jnp.float32) / 1000) ** 2)
    task = dataclasses.replace(task, train_data=exact, eval_data=None, loss_fn=loss_fn)
    small_runs.train(tmp_path, task, batch_size=64, steps=24, checkpoint=None, log={"every_steps": 1})
    epochs = [x["epoch"] for x in small_runs.lines(tmp_path, "metrics.jsonl")]
    assert epochs[0] == 0 and epochs == sorted(epochs) and epochs[-1] > 0
