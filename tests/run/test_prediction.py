"""`predict`: the results of `Task.predict_fn` for every row of a data set, on every mesh."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.cluster import ClusterSpec, join
from spmdkit.errors import ConfigError
from spmdkit.run import prediction
from spmdkit.run.prediction import predict

NUM = 21  # batches of 8: the last is short
random = np.random.default_rng(0)
ROWS = {"x": random.normal(size=(NUM, 4)).astype(np.float32), "y": np.zeros(NUM, np.float32)}


def init(key):
    return {"w": jax.random.normal(key, (4, 8))}


def predict_fn(params, batch):
    hidden = batch["x"] @ params["w"]
    half = hidden.astype(jax.numpy.bfloat16)
    return {"hidden": hidden, "best": {"index": hidden.argmax(-1), "is_large": hidden[:, 0] > 0}, "half": half}


def task(**more):
    loss = lambda params, batch, key: sk.mean((batch["x"] @ params["w"]).sum(-1) - batch["y"])
    data = {"train_data": ROWS, "eval_data": ROWS, "predict_fn": predict_fn, "rules": [("w", [None, "tensor"])]}
    return sk.Task(init, loss, optax.sgd(0.1), **(data | more))


def config(tmp_path, mesh, num, **more):
    settings = {"batch_size": 8, "steps": 2, "devices": f"cpu:{num}", "mesh": mesh, "compile_cache": None}
    return sk.Config(task="t.py:t", run_dir=str(tmp_path), **settings, **({"row_mixing": "error"} | more))


def predicted(made, *data, **more):
    return predict(made, *data, cluster=join(ClusterSpec(), made.devices), task=task(**more), initial=True)


MESHES = [({}, "auto"), ({"data": 4}, "auto"), ({"fsdp": 4}, "auto"), ({"data": 2, "tensor": 2}, "auto")]


@pytest.mark.parametrize(("mesh", "sharding"), [*MESHES, ({"data": 4}, "explicit")])
def test_results_equal_one_call_over_all_rows(tmp_path, mesh, sharding):
    num = int(np.prod([1, *mesh.values()]))
    made = config(tmp_path, mesh, num)
    found = predicted(made, sharding=sharding)
    expected = predict_fn(init(jax.random.key(0)), ROWS)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    np.testing.assert_array_equal(found["best"]["index"], expected["best"]["index"])
    np.testing.assert_array_equal(found["best"]["is_large"], expected["best"]["is_large"])
    np.testing.assert_allclose(found["hidden"], expected["hidden"], rtol=1e-5, atol=1e-6)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: np.dtype(x.dtype), expected)
    assert found["hidden"].shape == (NUM, 8)
    if mesh == {}:
        unlabeled = {"x": ROWS["x"][:5]}
        other = predicted(made, unlabeled)
        np.testing.assert_allclose(other["hidden"], found["hidden"][:5], rtol=1e-5, atol=1e-6)


def test_every_row_of_several_sets_is_predicted(tmp_path):
    made = config(tmp_path, {"data": 4}, 4, eval={"batches": 1})
    sets = {"a": ROWS, "b": {name: x[:16] for name, x in ROWS.items()}}
    found = predicted(made, eval_data=sets, predict_fn=lambda params, batch: batch["x"])
    assert {name: x.tolist() for name, x in found.items()} == {name: rows["x"].tolist() for name, rows in sets.items()}


@sk.stream
def stream(shard, num_shards, seed):
    for i in range(shard, NUM, num_shards):
        yield {name: x[i] for name, x in ROWS.items()}


@pytest.mark.parametrize("data", [stream, "train_data"])
def test_rows_of_a_stream_or_of_training_keep_their_order(tmp_path, data):
    found = predicted(config(tmp_path, {"data": 4}, 4), data, predict_fn=lambda params, batch: batch["x"])
    assert np.array_equal(found, ROWS["x"])


@pytest.mark.parametrize("form", [{"model_state": "replica"}, {"sync": {"local_sgd": {"every": 2}}}])
def test_the_state_of_groups_is_exported_as_it_is_evaluated(tmp_path, form):
    def fn(params, state, batch):
        return (batch["x"] - state["mean"]) @ params["w"] * state["num"].astype(np.float32) + state["largest"]

    def loss(params, state, batch, key):
        x, num = batch["x"], state["num"] + batch["x"].shape[0]
        new = {"mean": x.mean(0), "num": num, "largest": jax.numpy.abs(x).max()}
        return sk.mean(fn(params, state, batch).sum(-1) - batch["y"]), {}, new

    empty = {"mean": jax.numpy.zeros(4), "num": jax.numpy.int32(0), "largest": jax.numpy.float32(0)}
    kinds = {"num": "sum", "largest": "max"}
    task = sk.Task(lambda key: sk.Variables(init(key), empty), loss, optax.sgd(0.1), ROWS, ROWS, state_reduction=kinds)
    made = config(tmp_path, {"data": 2}, 2, row_mixing="warn", **form)
    cluster, task = join(ClusterSpec(), made.devices), dataclasses.replace(task, predict_fn=fn)
    sk.train(made, cluster, task)
    found = predict(made, cluster=cluster, task=task)
    state = sk.load_params(tmp_path, "model_state")
    np.testing.assert_allclose(fn(sk.load_params(tmp_path), state, ROWS), found, rtol=1e-5, atol=1e-5)
    warm = sk.build(config(tmp_path / "warm", {"data": 4}, 4, init_from=str(tmp_path), **form), task, jax.devices()[:4])
    assert np.array_equal(warm.init().model_state["num"], [state["num"]] * 4)


def test_predictions_that_depend_on_other_rows_are_reported(tmp_path, capsys):
    centered = lambda params, batch: {"x": batch["x"] - batch["x"].mean(0)}
    predicted(config(tmp_path, {}, 1, row_mixing="warn"), predict_fn=centered)
    shown = capsys.readouterr().err
    assert "predict_fn mixes rows in result 'x'. A replica" in shown and "test_prediction.py:" in shown
    with pytest.raises(ConfigError, match="row_mixing is error"):
        predicted(config(tmp_path, {}, 1), predict_fn=centered)


def test_files_hold_arrays_by_their_paths(tmp_path):
    prediction.write({"a": np.arange(3), "b": {"c": np.ones((3, 2))}}, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as found:
        assert sorted(found) == ["a", "b/c"] and found["b/c"].shape == (3, 2)
    prediction.write(np.arange(3).astype(jax.numpy.bfloat16), tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"returns 2 arrays\. Write an .npz file"):
        prediction.write({"a": np.ones(1), "b": np.ones(1)}, tmp_path / "two.npy")
    for name, match in [("out.npz", "it exists"), ("out.csv", "unknown suffix")]:
        with pytest.raises(ConfigError, match=match):
            prediction.check_out(tmp_path / name)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"predict_fn": None}, "the task has none"),
        ({"eval_data": None}, "the task has no eval_data"),
        ({"eval_data": {name: x[:0] for name, x in ROWS.items()}}, "eval_data is empty"),
        ({"predict_fn": lambda params, batch: jax.random.split(jax.random.key(0), 8)}, "one row of numbers"),
        ({"predict_fn": lambda params, batch: batch["x"].sum()}, "for 8 rows. The first dim"),
        ({"predict_fn": lambda params, batch: batch["x"] @ params["w"].T}, "^predict_fn cannot be traced"),
    ],
)
def test_bad_tasks_are_refused(tmp_path, more, match):
    with pytest.raises(ConfigError, match=match):
        predicted(config(tmp_path, {}, 1), **more)
