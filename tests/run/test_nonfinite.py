"""What is not finite ends a run with 77, is skipped, is gone back from, or is said: each by choice, for loss, gradient, metrics and evaluation."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit import checkpoint
from spmdkit.cluster import environment, join
from spmdkit.errors import NonFiniteError

ROWS, BATCH = 96, 16
CLEAN = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2), {"size": sk.mean(jnp.abs(batch).max(-1))}


def make_task(data=CLEAN, **changes):
    given = {"train_data": data, "eval_data": CLEAN[:8], **changes}
    return sk.Task(
        lambda key: {"w": jnp.zeros((3,))}, given.pop("loss_fn", loss_fn), optax.sgd(0.05, momentum=0.9), **given
    )


def train(tmp_path, task, **changes):
    values = {
        "task": "inline.py:task",
        "run_dir": str(tmp_path / "run"),
        "steps": 12,
        "batch_size": BATCH,
        "devices": "cpu:2",
        "mesh": {"data": 2},
        "data": {"shuffle": False},
        "log": {"every_steps": 4, "progress": "plain"},
    }
    config = sk.Config(**values | changes)
    return sk.train(config, join(environment({}), config.devices), task)


def lines(tmp_path, name="metrics.jsonl"):
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


# ---- evaluation, metrics, the final model ------------------------------------------------------------------------------


def poisoned_evaluation(params, batch):
    return {"loss": sk.mean(batch @ params["w"]), "worst": sk.max(jnp.where(params["w"][0] > 0, jnp.inf, batch[:, 0]))}


def test_an_evaluation_that_is_not_finite_ends_the_run_with_77_the_last_one_too(tmp_path):
    task = make_task(eval_fn=poisoned_evaluation)
    with pytest.raises(NonFiniteError, match=r"evaluation .* step 12: 'worst' is inf") as caught:
        train(tmp_path, task, checkpoint={"every_steps": 6})
    assert caught.value.exit_code == 77
    assert [row["step"] for row in checkpoint.ls(tmp_path / "run" / "checkpoints")] == [6]
    assert "fault" in [line["event"] for line in lines(tmp_path, "events.jsonl")]  # "saved" of step 6 may come after it


def test_an_evaluation_that_is_not_finite_is_said_where_that_is_asked_for(tmp_path, capfd):
    train(tmp_path, make_task(eval_fn=poisoned_evaluation), on_nonfinite={"evaluation": "continue"})
    assert "'worst' is inf" in capfd.readouterr().out


def metric_fn(params, batch, key):
    loss, _ = loss_fn(params, batch, key)
    return loss, {"rate": sk.mean(jnp.where(batch[:, 0] > 90, jnp.nan, 1.0))}


def test_a_metric_that_is_not_finite_ends_the_run_where_loss_and_gradient_are(tmp_path):
    data = CLEAN.copy()
    data[3 * BATCH + 5] = [100, 0, 0]  # step 4, a log step
    with pytest.raises(NonFiniteError, match=r"metric 'rate' is nan at step 4"):
        train(tmp_path, make_task(data, loss_fn=metric_fn))
    assert (
        int(train(tmp_path / "b", make_task(data, loss_fn=metric_fn), on_nonfinite={"metrics": "continue"}).state.step)
        == 12
    )


def test_the_command_eval_ends_with_77_after_it_has_printed(tmp_path, monkeypatch, capsys):
    from typer.testing import CliRunner

    from spmdkit import cli
    from spmdkit.run import loop

    monkeypatch.setattr(loop, "evaluate", lambda config, cluster: (4, {"loss": float("nan")}))
    monkeypatch.setattr(cli, "_join", lambda path, overrides: (config, join(environment({}), "cpu:2")))
    for policy in ("stop", "continue"):
        config = sk.Config(task="t.py:t", on_nonfinite={"evaluation": policy})
        found = CliRunner().invoke(cli.app, ["eval", "unused.yaml"])
        assert "step 4 eval  loss nan" in found.output
        assert isinstance(found.exception, NonFiniteError) == (policy == "stop"), found.exception
