"""Which checkpoints a run leaves, and the commands that list, evaluate, verify and remove them."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax.numpy as jnp
import optax
import pytest

from spmdkit import checkpoint, cli
from spmdkit.checkpoint import ls
from spmdkit.checkpoint.record import read_record, write_record
from spmdkit.cli import checkpoint as cli_checkpoint
from spmdkit.errors import CheckpointError, ConfigError
from spmdkit.run.loop import evaluate
from tests.run.test_restore import flip_every_array, lose_a_file
from tests.support.small_runs import config_of, detect_cluster, events, join, line_task, lines, train

SETTINGS = {
    "checkpoint": {"every_steps": None, "keep": 1, "best": {"metric": "loss", "mode": "min"}},
    "eval": {"every_steps": 3},
}


def there_and_back():
    """A task whose loss falls for six steps and then rises again: the gradient is climbed."""
    optimizer = optax.sgd(lambda count: jnp.where(count < 6, 0.1, -0.05))
    return dataclasses.replace(line_task(), optimizer=optimizer)


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("climbed")
    train(folder, there_and_back(), **SETTINGS)
    return folder


def losses(folder):
    return {line["step"]: line["loss"] for line in lines(folder, "metrics.jsonl") if line.get("split") == "eval"}


def test_best_evaluation_is_always_saved(climbed):
    values = losses(climbed)
    assert min(values, key=values.get) == 6 and values[20] > values[6]
    assert [event["step"] for event in events(climbed, "saved")] == [3, 6, 20]
    assert [(row["step"], row["best"]) for row in ls(climbed / "run/checkpoints")] == [(6, True), (20, False)]


def test_what_was_best_is_known_after_a_restart(climbed, tmp_path):
    shutil.copytree(climbed / "run", tmp_path / "run")
    train(tmp_path, there_and_back(), **SETTINGS | {"steps": 25})
    assert [event["step"] for event in events(tmp_path, "saved")] == [3, 6, 20, 25]
    assert [row["step"] for row in ls(tmp_path / "run/checkpoints")] == [6, 25]


def test_best_named_and_newest_step_are_evaluated(climbed):
    config = config_of(climbed, **SETTINGS)
    ask = lambda **which: evaluate(config, join(detect_cluster({}), config.devices), there_and_back(), **which)
    for which, step in (({"best": True}, 6), ({"step": 6}, 6), ({}, 20)):
        found, values = ask(**which)
        assert found == step and values["loss"] == pytest.approx(losses(climbed)[step], rel=1e-6)
    with pytest.raises(CheckpointError, match=r"step 7 is requested, but .* has steps 6, 20"):
        ask(step=7)


@pytest.mark.slow
def test_eval_best_without_a_rule_names_the_repair(tmp_path):
    train(tmp_path, steps=5)
    config = config_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"the best checkpoint is requested.*Set checkpoint: \{best:"):
        evaluate(config, join(detect_cluster({}), config.devices), line_task(), best=True)


@pytest.fixture
def saved(climbed, tmp_path):
    shutil.copytree(climbed / "run", tmp_path / "run")
    return tmp_path / "run"


def test_ls_shows_damage_best_size_and_age(saved, capsys):
    lose_a_file(saved / "checkpoints/20")
    shutil.copytree(saved / "checkpoints/6", saved / "checkpoints/4.damaged")
    assert cli.main(["checkpoint", "ls", str(saved)]) == 0
    six, twenty, aside, *_ = capsys.readouterr().out.splitlines()
    assert six.split()[0] == "6" and "KiB" in six and " ago)" in six and six.endswith("best")
    assert "DAMAGED: state/_METADATA is missing" in twenty
    assert aside == "damaged, quarantined: 4.damaged"
    (saved / "checkpoints/6/record.json").write_text("{")
    assert cli.main(["checkpoint", "ls", str(saved)]) == 0
    assert "unknown time" in capsys.readouterr().out


def test_verify_reads_every_byte_and_names_the_leaf(saved, capsys):
    assert cli.main(["checkpoint", "verify", str(saved)]) == 0
    assert capsys.readouterr().out.count("good") == 2
    directory = saved / "checkpoints"
    large = dataclasses.replace(
        read_record(directory, 6), digests={}
    )  # files so large that only the arrays' own checksums cover them
    write_record(directory / "6", large)
    flip_every_array(directory / "6")
    with pytest.raises(CheckpointError, match=r"1 of 2 checkpoints in .* is damaged: 6"):
        cli_checkpoint.checkpoint_verify(saved, json_=True)
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["good"]) for row in rows] == [(6, False), (20, True)]


def test_rm_never_removes_the_last_valid_step(saved):
    directory = saved / "checkpoints"
    with pytest.raises(CheckpointError, match=r"has no step 7.*steps are 6, 20"):
        checkpoint.remove(directory, [6, 7])
    lose_a_file(directory / "20")
    with pytest.raises(CheckpointError, match="step 6 is the last valid checkpoint"):
        checkpoint.remove(directory, [6])
    assert cli.main(["checkpoint", "rm", str(saved), "20"]) == 0
    assert [row["step"] for row in ls(directory)] == [6]
    with pytest.raises(CheckpointError, match="step 6 is the last valid checkpoint"):
        checkpoint.remove(directory, [6])


def test_rm_does_not_touch_a_run_that_trains(saved):
    with checkpoint.run_lock(saved), pytest.raises(ConfigError, match="in use by"):
        cli_checkpoint.checkpoint_rm(saved, [20])
