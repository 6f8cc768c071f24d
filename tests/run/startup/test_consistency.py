"""Each difference between processes is found before the first step, and named. Processes are threads over one store."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.run.startup import run_directory
from spmdkit.run.startup.consistency import same_data, same_program, same_state, start_facts
from tests.support.clusters import on_all
from tests.support.small_runs import config_of, line_task

X = np.random.default_rng(0).normal(size=(64, 1)).astype(np.float32)


def differs(compare, first, second):
    """Returns the message that both of two processes get."""

    def message(cluster):
        with pytest.raises(ConfigError) as caught:
            compare(cluster, first if cluster.is_main else second)
        return str(caught.value)

    one, other = on_all(2, message)
    assert "process 1" in one and "process 1" in other
    return one


def with_data(data):
    return dataclasses.replace(line_task(), train_data=data, eval_data=None)


def scaled(row, factor):
    x = X.copy()
    x[row] *= factor
    return {"x": x}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (scaled(40, 2), ["train_data", "row 40"]),
        ({"x": X[:63]}, ["train_data", "64", "63"]),
        ({"x": X.astype(np.float16)}, ["float16", "float32"]),
    ],
    ids=["a row", "length", "dtype"],
)
def test_differing_data_are_refused_with_the_repair(data, words):
    task = lambda given: lambda: with_data(given)
    text = differs(lambda cluster, make: same_data(cluster, make), task({"x": X}), task(data))
    assert all(word in text for word in [*words, "sk.per_process"]), text


def test_own_data_with_another_structure_are_refused():
    task = lambda width: lambda: with_data(sk.per_process({"x": np.zeros((8, width), np.float32)}))
    text = differs(lambda cluster, make: same_data(cluster, make), task(2), task(3))
    assert "float32[2]" in text and "float32[3]" in text
    lengths = on_all(
        2, lambda cluster: same_data(cluster, lambda: with_data(sk.per_process({"x": X[: 8 - cluster.process_index]})))
    )
    assert [task.train_data.lengths for task in lengths] == [(8, 7), (8, 7)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": optax.sgd(0.5)}, ["program of a step"]),
        ({"init": lambda key: {"w": jnp.full((1, 1), 3.0)}}, ["init", "3.0"]),
    ],
    ids=["optimizer", "init"],
)
def test_differing_programs_are_refused_before_compilation(tmp_path, change, words):
    tasks = [line_task(), dataclasses.replace(line_task(), **change)]
    programs = [sk.build(config_of(tmp_path), task) for task in tasks]
    text = differs(lambda cluster, program: same_program(cluster, lambda: program), *programs)
    assert all(word in text for word in words), text


def test_one_bit_of_the_first_state_is_named():
    w = np.arange(4, dtype=np.float32)
    flipped = w.copy()
    flipped.view(np.uint32)[2] ^= 1
    states = [{"params": {"w": jax.device_put(x)}, "step": jnp.int32(0)} for x in (w, flipped)]
    assert "params/w" in differs(lambda cluster, state: same_state(cluster, 0, state), *states)


def test_versions_files_and_variables_are_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    facts = start_facts(config_of(tmp_path))
    assert {"config", "version of optax", "version of python", "spmdkit/step/metrics/mean.py"} <= facts.keys()
    assert "fast_math" in facts["XLA_FLAGS"]


def test_run_directory_must_be_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "RUN_DIRECTORY_VISIBLE_S", 0.1)

    def take(cluster, folder):
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            run_directory.claim_directory(cluster, folder, stack)

    text = differs(take, tmp_path / "a", tmp_path / "b")
    assert "run directory" in text and str(tmp_path / "b") in text and "Set run_dir" in text
