"""The evaluator of TF_CONFIG: each checkpoint once, while the run goes on beside it, until the run is finished."""

import pytest

import spmdkit as sk
from spmdkit.cluster import ClusterSpec
from spmdkit.errors import ConfigError, NonFiniteError
from spmdkit.run.evaluator import evaluate_each
from tests.support.small_runs import config_of, line_task, lines, train


def follow(folder, sleep=lambda seconds: pytest.fail("nothing is left to wait for"), **changes):
    said = []
    found = evaluate_each(config_of(folder, **changes), ClusterSpec(), line_task(), sleep=sleep, print_line=said.append)
    return found, said


def test_each_checkpoint_is_evaluated_once(tmp_path):
    turns = iter((10, 20))
    saves = {"checkpoint": {"every_steps": 5, "keep": 9}, "eval": {"every_steps": 5}}
    meanwhile = lambda seconds: train(tmp_path, steps=next(turns), **saves)
    found, said = follow(tmp_path, meanwhile)  # began before there was a run directory
    assert found == [5, 10, 15, 20]
    assert said[0].startswith("evaluator of ") and "step 10 eval  loss " in said[2]
    own = {line["step"]: line["loss"] for line in lines(tmp_path, "metrics.jsonl") if line.get("split") == "eval"}
    theirs = {line["step"]: line["loss"] for line in lines(tmp_path, "evaluator.jsonl")}
    assert theirs == pytest.approx(own, rel=1e-6) and len(theirs) == 4
    assert follow(tmp_path)[0] == []  # started again: what stands in its file is done
    assert len(lines(tmp_path, "evaluator.jsonl")) == 4


@pytest.mark.slow
def test_run_ended_by_a_hook_ends_evaluator(tmp_path):
    stop = sk.Hook(
        name="enough", after_step=lambda run, step, state, metrics: sk.Stop(0, "enough") if step == 7 else None
    )
    task = line_task()
    train(
        tmp_path,
        sk.Task(
            task.init, task.loss_fn, task.optimizer, train_data=task.train_data, eval_data=task.eval_data, hooks=[stop]
        ),
    )
    assert follow(tmp_path)[0] == [5, 7]


@pytest.mark.slow
def test_nonfinite_evaluation_ends_the_evaluator(tmp_path, monkeypatch):
    train(tmp_path)
    monkeypatch.setattr("spmdkit.program.program.Program.eval", lambda self, state: {"loss": float("nan")})
    with pytest.raises(NonFiniteError, match="the evaluation of step 10"):
        follow(tmp_path)


def test_evaluator_needs_checkpoints_and_does_not_train(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        follow(tmp_path, checkpoint=None)
    with pytest.raises(ConfigError, match="has no eval_data"):
        task = sk.Task(line_task().init, line_task().loss_fn, line_task().optimizer, train_data=line_task().train_data)
        evaluate_each(config_of(tmp_path), ClusterSpec(), task)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"chief": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}')
    with pytest.raises(ConfigError, match=r"is an evaluator .*task evaluator"):
        sk.train(config_of(tmp_path), task=line_task())
