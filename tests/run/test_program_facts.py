"""What processes compare of their programs before the first step: also those that are compiled later in the run."""

import dataclasses

import jax.numpy as jnp
import pytest

import spmdkit as sk
from spmdkit.run.startup.consistency import program_facts
from tests.support.small_runs import config_of, line_task

TEXT = {"config with auto chosen", "mesh", "form"}


def facts(tmp_path, task=None, **changes):
    return program_facts(sk.build(config_of(tmp_path, **changes), task or line_task()))


def evaluated(scale):
    return dataclasses.replace(
        line_task(), eval_fn=lambda params, batch: {"error": sk.mean(scale * jnp.abs(batch["x"] @ params["w"]))}
    )


def test_another_evaluation_changes_only_its_program(tmp_path):
    ours, theirs = facts(tmp_path, evaluated(1.5)), facts(tmp_path, evaluated(2.5))
    assert {name for name in ours if ours[name] != theirs[name]} == {"program of an evaluation"}
    assert "2.5" in theirs["program of an evaluation"]


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"reducer": {"bfloat16": {"warmup": 2}}}, "program of a step while the reducer warms up"),
        ({"sync": {"local_sgd": {"every": 5}}}, "program in which groups agree"),
    ],
    ids=["a reducer that warms up", "groups"],
)
def test_programs_of_other_phases_are_compared(tmp_path, changes, more):
    found = facts(tmp_path, **changes)
    assert found.keys() == {*TEXT, "init", "program of a step", "program of an evaluation", more}
    assert all("func.func" in found[name] for name in found.keys() - TEXT)
    assert found[more] != found["program of a step"]
