"""`sk.train` in Python and in notebooks: no config file, new directories, the history, short reprs and errors."""

import dataclasses
import gc

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.config import load_config
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import garbage
from spmdkit.foundation.constants import ERROR_FILE

X = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(64, 4)
DATA = {"x": X, "y": X.sum(1)}


def init(key):
    return {"w": jnp.zeros(4)}


def make_loss(scale=1.0):
    return lambda params, batch, key: sk.mean(scale * (batch["x"] @ params["w"] - batch["y"]) ** 2)


def make_task(scale=1.0):
    return sk.Task(init, make_loss(scale), lambda rate: optax.sgd(rate), DATA, DATA)


SETTINGS = {"steps": 4, "batch_size": 16, "devices": "cpu:8", "mesh": {"data": -1}, "log": {"progress": "off"}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run with an evaluation, in a directory that all tests read."""
    directory = str(tmp_path_factory.mktemp("shared") / "run")
    more = {"eval": {"every_steps": 2}, "checkpoint": {"every_steps": 2}, "run_dir": directory}
    return sk.train(task=make_task(), learning_rate=0.1, **SETTINGS, **more)


def test_each_model_of_a_sweep_has_its_directory(folder):
    rates = (0.0, 0.1, 0.2)
    results = [sk.train(task=make_task(), learning_rate=rate, **SETTINGS) for rate in rates]
    assert [r.run_dir for r in results] == [folder / "runs" / f"run-{n}" for n in (1, 2, 3)]
    assert len({float(r.state.params["w"][0]) for r in results}) == 3 and not any(r.already_finished for r in results)
    again = sk.train(task=make_task(), learning_rate=0.1, run_dir=results[1].run_dir, **SETTINGS)
    assert again.already_finished and (again.state.params["w"] == results[1].state.params["w"]).all()


def test_a_hook_leaves_its_cycles_to_a_collector_as_usual(folder):
    usual, seen = gc.get_threshold(), []
    hook = sk.Hook("look", after_step=lambda run, step, state, metrics: seen.append(gc.get_threshold()))
    garbage.collect_rarely()
    assert gc.get_threshold() == garbage.RARELY
    sk.train(task=dataclasses.replace(make_task(), hooks=[hook]), learning_rate=0.1, **SETTINGS | {"steps": 1})
    assert seen == [usual] == [gc.get_threshold()]


def test_settings_replace_those_of_a_config(folder):
    config = sk.Config(learning_rate=0.1, epochs=3, run_dir="runs/a", **(SETTINGS | {"steps": None}))
    assert sk.train(config, task=make_task(), steps=2).run.step == 2
    counted = sk.train(sk.Config(**SETTINGS), task=make_task(), epochs=2, learning_rate=0.1)
    assert counted.run.step == 8
    with pytest.raises(ConfigError, match=r"^stepps: unknown key\. Did you mean 'steps'\?$"):
        sk.train(task=make_task(), stepps=2)


def test_a_restarted_process_continues_in_one_directory(folder, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(folder / "error.json"))
    assert sk.train(task=make_task(), learning_rate=0.1, **SETTINGS).run_dir == folder / "runs" / "run"


def test_a_missing_task_leaves_no_directory(folder):
    with pytest.raises(ConfigError, match=r"names no task. In Python a task is passed: sk\.train\(task=task"):
        sk.train(**SETTINGS)
    assert not list((folder / "runs").iterdir())
    (folder / "run.yaml").write_text("steps: 3\n")
    with pytest.raises(ConfigError, match="task: is missing"):
        load_config("run.yaml")


def test_the_history_is_a_table(result):
    keys = [(line["split"], line["step"]) for line in result.history]
    assert keys == [("train", 1), ("eval", 2), ("train", 4), ("eval", 4)]
    assert all(isinstance(line["loss"], float) for line in result.history)
    assert result.evaluation == {"loss": result.history[-1]["loss"]}


def test_a_finished_run_has_its_evaluation(result):
    more = {"eval": {"every_steps": 2}, "checkpoint": {"every_steps": 2}, "run_dir": str(result.run_dir)}
    again = sk.train(task=make_task(), learning_rate=0.1, **SETTINGS, **more)
    assert again.already_finished and again.evaluation == result.evaluation


def test_a_repr_has_three_short_lines(result):
    batch = next(iter(result.program.batches()))[1]
    shown = [repr(x) for x in (result, make_task(), result.program, result.state, batch)]
    lines = [text.splitlines() for text in shown]
    assert all(len(text) == 3 and all(len(line) <= 160 for line in text) for text in lines), shown
    for text, part in zip(
        shown,
        (f"run_dir: {result.run_dir}", "x float32[64,4]", "data 8 on 8 x cpu", "step 4", "x float32[16,4]"),
        strict=True,
    ):
        assert part in text
    assert (
        repr(sk.Task(init, make_loss(), optax.sgd(1.0), [1, 2])).splitlines()[1] == "  train_data: list of 2 examples"
    )


def test_an_error_in_a_notebook_has_no_frames_of_spmdkit():
    with pytest.raises(UserCodeError) as caught:
        sk.train(task=sk.Task(init, lambda p, b, key: 1 / 0, optax.sgd(1.0), DATA), **SETTINGS)
    lines = caught.value._render_traceback_()
    assert (
        lines[0].startswith("loss_fn raised ZeroDivisionError at ")
        and lines[-1] == "ZeroDivisionError: division by zero"
    )
    assert len(lines) <= 6 and not any("/spmdkit/" in line.split("test_train_in_python")[0] for line in lines[1:])
    with pytest.raises(ConfigError) as caught:
        sk.train(task=sk.Task(init, lambda p, b, key: p["w"].sum(), optax.sgd(1.0), DATA), **SETTINGS)
    assert caught.value._render_traceback_() == str(caught.value).splitlines()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_changed_loss_without_a_file_is_reported(scale, folder, capsys):
    settings = SETTINGS | {"learning_rate": 1e-3, "run_dir": "runs/cell", "log": {"progress": "plain"}}
    sk.train(task=make_task(), **settings)
    capsys.readouterr()
    sk.train(task=make_task(scale), **(settings | {"steps": 6}))
    reported = "the step of the task  text " in capsys.readouterr().out
    assert reported == (scale != 1.0)
