"""Several evaluation sets: metrics, the best checkpoint, `eval --set`, compiled programs, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.data import EvaluationSets, evaluation_sets
from spmdkit.errors import ConfigError
from spmdkit.run.loop import evaluate
from tests.support import small_runs
from tests.support.core_runs import program_of
from tests.support.small_runs import X, config_of, detect_cluster, join, line_task, lines
from tests.support.streams import uneven

A, B, C = {"x": X[:33]}, {"x": 3 * X[33:66]}, [{"x": row} for row in X[:40]]
SETTINGS = {
    "checkpoint": {"every_steps": None, "keep": 1, "best": {"metric": "hard/loss"}},
    "eval": {"every_steps": 4},
}


def test_sets_in_a_run(tmp_path):
    task = dataclasses.replace(line_task(), eval_data={"clean": A, "hard": B, "more": C})
    result = small_runs.train(tmp_path, task, steps=8, **SETTINGS)
    program, state = result.run.program, result.state
    together = program.eval(state)
    for name, rows in (("clean", A), ("hard", B), ("more", {"x": X[:40]})):
        alone = program_of(dataclasses.replace(task, eval_data=rows), batch_size=32, mesh={"data": 2})
        np.testing.assert_allclose(together[f"{name}/loss"], alone.eval(state)["loss"], rtol=1e-6)
        assert program.eval(state, name) == {f"{name}/loss": together[f"{name}/loss"]}
    assert result.evaluation == together and together["hard/loss"] > 2 * together["clean/loss"]
    evaluated = [line for line in lines(tmp_path, "metrics.jsonl") if line.get("split") == "eval"]
    assert [line["step"] for line in evaluated] == [4, 8] and {"clean/loss", "hard/loss"} <= evaluated[0].keys()
    assert len({id(one) for one in program.evaluator._of.values()}) == 1
    config = config_of(tmp_path, steps=8, **SETTINGS)
    cluster = join(detect_cluster({}), config.devices)
    assert evaluate(config, cluster, task, best=True, name="hard") == (8, {"hard/loss": together["hard/loss"]})
    with pytest.raises(ConfigError, match=r"eval_data has no set hart: it has clean, hard, more"):
        evaluate(config, cluster, task, name="hart")


@pytest.mark.parametrize(("given", "train", "sets"), [
    ({"a": A, "b": B}, A, ["a", "b"]),
    ({"x": X}, A, None),
    ({"x": X}, C, None),
    ({"a": C, "b": A}, A, ["a", "b"]),
    ({"a": X, "b": X}, X, ["a", "b"]),
    ({"a": X, "b": X}, A, None),
    ({"a": A, "b": C}, None, ["a", "b"]),
    ({"a": X, "b": X}, None, None),
    ({"x": A}, {"x": A}, None),
    (A, None, None),
])  # fmt: skip
def test_a_mapping_is_one_set_or_several(given, train, sets):
    found = evaluation_sets(given, train)
    assert (list(found) if isinstance(found, EvaluationSets) else None) == sets


def test_errors_of_sets():
    with pytest.raises(ConfigError, match=r"eval_data\['b'\] has the structure .*Return the same keys"):
        evaluation_sets({"a": A, "b": X}, A)
    with pytest.raises(ConfigError, match=r"eval_data has a set named 'a/b'"):
        evaluation_sets({"a/b": A}, A)
    for sets in ([A, B], [iter([1, 2])]):
        with pytest.raises(ConfigError, match=r"eval_data is a list of data sets.*\"clean\": a"):
            evaluation_sets(sets, A)


def test_streams_and_arrays_as_sets():
    task = sk.Task(
        lambda key: {"w": np.float32(0.1)},
        lambda params, batch, key: sk.mean(params["w"] * batch["x"][:, 0]),
        optax.sgd(0.1),
        train_data=uneven,
        eval_data={"s": uneven, "a": {"id": np.arange(9), "x": np.ones((9, 3), np.float32)}},
    )
    program = program_of(task, batch_size=16, data={"shards": 8}, mesh={"data": 2})
    values = program.eval(program.init())
    rows = np.concatenate([100 * shard + np.arange(3 + shard % 8) for shard in range(8)])
    np.testing.assert_allclose([values["s/loss"], values["a/loss"]], [0.1 * rows.mean(), 0.1], rtol=1e-5)


def test_random_keys_of_an_evaluation_differ_by_batch():
    def loss(params, batch, key):
        return sk.mean(jax.random.uniform(key, ()) + 0 * batch["x"] @ params["w"])

    def evaluated(rows):
        data = {"x": np.ones((rows, 2), np.float32)}
        init = lambda key: {"w": jnp.zeros(2)}
        task = sk.Task(init, loss, optax.sgd(0.1), train_data=data, eval_data=data)
        program = program_of(task, batch_size=8)
        state = program.init()
        assert program.eval(state) == program.eval(state)
        return program.eval(state)["loss"]

    first, both = evaluated(8), evaluated(16)
    second = 2 * both - first
    assert 0 < second < 1 and abs(second - first) > 1e-3
