"""spmdkit against numbers that TensorFlow's own strategies gave (golden.json, by `make reference`), on the linear
regression y = 2x."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join
from spmdkit.config import replace_keys

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["tensorflow"]


def program_of(of, num, **config):
    """Returns the program of SGD from the golden run's start, on its data in their order."""
    x = np.linspace(-1, 1, num, dtype=np.float32)

    def loss_fn(params, batch, key):
        return sk.mean((params["w"] * batch["x"] + params["b"] - batch["y"]) ** 2)

    init = lambda key: {"w": jnp.float32(of["w0"]), "b": jnp.float32(of["b0"])}
    task = sk.Task(init, loss_fn, optax.sgd(of["rate"]), train_data={"x": x, "y": 2 * x})
    config = sk.Config(task="inline.py:task", batch_size=of["batch_size"], data={"shuffle": False}, **config)
    return sk.build(config, task)


def run(program, steps):
    """Returns (losses, w, b) of each step."""
    state, found = program.init(), []
    for _, batch in program.batches(1, steps):
        state, metrics = program.step(state, batch)
        found.append((float(metrics["loss"]), float(state.params["w"]), float(state.params["b"])))
    return np.array(found).T


def test_mirrored_is_tensorflows_mirrored_strategy():
    golden = GOLDEN["mirrored"]
    losses, w, b = run(program_of(golden, 32, devices="cpu:4", mesh={"data": golden["replicas"]}), len(golden["w"]))
    np.testing.assert_allclose(losses, golden["loss"], rtol=2e-6)
    np.testing.assert_allclose(w, golden["w"], rtol=2e-6)
    np.testing.assert_allclose(b, golden["b"], rtol=1e-5, atol=1e-7)


def test_one_tensorflow_worker_is_sgd():
    golden = GOLDEN["parameter_server_1"]
    _, w, b = run(program_of(golden, 8, devices="cpu:1"), golden["updates"])
    assert golden["updates"] == 20
    np.testing.assert_allclose((w[-1], b[-1]), (golden["w"], golden["b"]), rtol=1e-5, atol=1e-6)


def test_one_parameter_server_worker_is_tensorflows(tmp_path):
    """A worker there runs its closures one after the other, and reads what it has written."""
    golden = GOLDEN["parameter_server_1"]
    sync = {"parameter_server": {"servers": 1, "workers": 1, "max_staleness": 0, "transport": "threads"}}
    one = program_of(golden, 8, devices="cpu:1")
    config = replace_keys(
        one.config, {"sync": sync, "steps": golden["updates"], "run_dir": str(tmp_path), "checkpoint": None}
    )
    params = sk.train(config, join(detect_cluster({}), "cpu:1"), one.task).state.params
    np.testing.assert_allclose(
        (float(params["w"]), float(params["b"])), (golden["w"], golden["b"]), rtol=1e-5, atol=1e-6
    )
