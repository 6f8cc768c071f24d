"""A run that ended in its last evaluation is evaluated at its next start, and is not reported as finished before."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import NonFiniteError, UserCodeError
from tests.support import small_runs


def task(eval_fn):
    loss = lambda p, b, key: sk.mean((b["x"] @ p["w"] - 2 * b["x"]) ** 2)
    data = {"x": small_runs.X}
    init = lambda key: {"w": jnp.zeros((1, 1))}
    return sk.Task(init, loss, optax.adam(0.05), train_data=data, eval_data=data, eval_fn=eval_fn)


def good(params, batch):
    return {"loss": sk.mean(batch["x"] @ params["w"])}


def infinite(params, batch):
    return {"loss": sk.mean(batch["x"] @ params["w"] / 0.0)}


def evaluations(folder):
    return [line for line in small_runs.lines(folder, "metrics.jsonl") if line.get("split") == "eval"]


def test_failed_last_evaluation_is_repeated(tmp_path, capfd):
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"evaluation of step 20.*inf|evaluation of step 20.*nan"):
            small_runs.train(tmp_path, task(infinite))
    assert "already finished" not in capfd.readouterr().out
    result = small_runs.train(tmp_path, task(good))
    assert result.already_finished and result.evaluation.keys() == {"loss"}
    assert small_runs.steps(tmp_path) == [1, 5, 10, 15, 20]
    num = len(evaluations(tmp_path))
    result = small_runs.train(tmp_path, task(good))
    assert result.already_finished and len(evaluations(tmp_path)) == num
    again = small_runs.train(tmp_path, task(infinite))  # evaluated before, by the code of that start
    assert again.already_finished


def test_permitted_evaluation_is_not_repeated(tmp_path):
    permitted = {"on_nonfinite": {"evaluation": "continue"}}
    small_runs.train(tmp_path, task(infinite), **permitted)
    num = len(evaluations(tmp_path))
    assert small_runs.train(tmp_path, task(infinite), **permitted).already_finished
    assert len(evaluations(tmp_path)) == num == 1


def test_run_whose_hook_raised_after_the_last_evaluation_is_finished(tmp_path):
    @sk.hook
    def failing():
        def after_eval(run, step, values):
            raise ValueError("no disk")

        return sk.Hook("failing", after_eval=after_eval)

    with pytest.raises(UserCodeError, match="no disk"):
        small_runs.train(tmp_path, sk.Task(**vars(task(good)) | {"hooks": [failing()]}))
    num = len(evaluations(tmp_path))
    result = small_runs.train(tmp_path, task(good))
    assert result.already_finished and num == len(evaluations(tmp_path)) == 1
