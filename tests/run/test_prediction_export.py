"""`checkpoint export --stablehlo`: `Task.predict_fn` as a program that runs without spmdkit."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.cli import main
from spmdkit.errors import ConfigError
from spmdkit.run.prediction_export import export_predict
from tests.support.environment import environment_of_a_user
from tests.support.small_runs import config_of

st = pytest.importorskip("safetensors.numpy")
pytest.importorskip("flatbuffers")

random = np.random.default_rng(0)
ROWS = {"x": random.normal(size=(40, 4)).astype(np.float32), "y": np.zeros(40, np.float32)}

TASK = """
from tests.run import test_prediction_export as made

task = made.TRAINED
"""

LOAD = """
import pathlib, sys
sys.modules["spmdkit"] = None  # an import raises ImportError
import jax, jax.export, numpy as np
from safetensors.numpy import load_file

predict = jax.export.deserialize(bytearray(pathlib.Path("predict.bin").read_bytes()))
results = predict.call(load_file("model.safetensors"), {"x": np.load("x.npy")})
hidden, (index, is_large) = np.asarray(results["hidden"], np.float32), results["best"]
np.savez("found.npz", hidden=hidden, index=index, is_large=is_large)
"""


def init(key):
    return sk.Variables({"w": jax.random.normal(key, (4, 8)), "b": jnp.zeros(8)}, {"mean": jnp.zeros(4)})


def predict_fn(params, state, batch):
    x = batch["x"] - state["mean"].astype(batch["x"].dtype)
    hidden = x @ params["w"] + params["b"]
    return {"hidden": hidden, "best": (hidden.argmax(-1), hidden[:, 0] > 0)}


def loss(params, state, batch, key):
    hidden = predict_fn(params, state, batch)["hidden"]
    return sk.mean((hidden.sum(-1) - batch["y"]) ** 2), {}, {"mean": batch["x"].mean(0).astype(jnp.float32)}


TRAINED = sk.Task(
    init,
    loss,
    optax.contrib.schedule_free_sgd(0.01),
    train_data=ROWS,
    eval_data={k: x[:21] for k, x in ROWS.items()},
    predict_fn=predict_fn,
)


@pytest.mark.processes
def test_a_program_without_spmdkit_returns_the_same_predictions(tmp_path, monkeypatch):
    """Of a run on fsdp 2, in bfloat16, with an optimizer that evaluates other parameters than it trains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(TASK)
    (tmp_path / "t.yaml").write_text(
        "task: t.py:task\nrun_dir: run\nbatch_size: 8\nsteps: 3\nmesh: {fsdp: 2}\nlayout: {min_shard_bytes: 1}\n"
        "devices: cpu:2\nprecision: {compute: bfloat16}\ndata: {shuffle: false}\n"
    )
    assert main(["train", "t.yaml"]) == 0
    command = ["checkpoint", "export", "run", "model.safetensors", "--what", "params,model_state"]
    assert main([*command, "--stablehlo", "predict.bin"]) == 0
    np.save("x.npy", ROWS["x"][:21])
    environment = environment_of_a_user() | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-I", "-c", LOAD], cwd=tmp_path, env=environment, check=True)
    expected = sk.predict("t.yaml")
    with np.load("found.npz") as file:
        found = dict(file)
    assert np.array_equal(found["hidden"], expected["hidden"].astype(np.float32))
    np.testing.assert_array_equal(found["index"], expected["best"][0])
    np.testing.assert_array_equal(found["is_large"], expected["best"][1])
    assert found["is_large"].dtype == bool and expected["hidden"].dtype == jnp.bfloat16


def exported(tmp_path, monkeypatch, what=("params", "model_state"), lines=None, **changes):
    """Returns the loaded program of a changed task."""
    monkeypatch.setattr("spmdkit.run.prediction_export.task_of", lambda config: dataclasses.replace(TRAINED, **changes))
    config = config_of(tmp_path, batch_size=8)
    export_predict(config, what, tmp_path / "p.bin", print if lines is None else lines.append)
    return jax.export.deserialize(bytearray((tmp_path / "p.bin").read_bytes()))


def test_rows_are_fixed_where_the_function_needs_it(tmp_path, monkeypatch):
    by_row = lambda params, state, batch: jnp.stack([x @ params["w"] for x in batch["x"]])
    lines = []
    program = exported(tmp_path, monkeypatch, lines=lines, predict_fn=by_row)
    assert [line.split(" (")[0] for line in lines] == ["note: the program is only for 8 rows"]
    assert program.in_avals[-1].shape == (8, 4)


@pytest.mark.parametrize(
    ("what", "changes", "match"),
    [
        (["params"], {}, r"receives params, ema or training, and model_state\. Choose --what params,model_state"),
        (["params", "ema", "model_state"], {}, "Choose --what params,model_state"),
        (["params"], {"predict_fn": None}, r"checkpoint export --stablehlo needs Task\.predict_fn"),
        (
            ["params", "model_state"],
            {"predict_fn": lambda p, s, b: jax.pure_callback(lambda x: x, b["x"], b["x"])},
            "jax.export rejects predict_fn .*callback.*must not call the host",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch, what, changes, match):
    with pytest.raises(ConfigError, match=match):
        exported(tmp_path, monkeypatch, what, **changes)
    assert not (tmp_path / "p.bin").exists()
