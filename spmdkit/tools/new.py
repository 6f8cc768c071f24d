"""`spmdkit new NAME`: a folder with a task, its config and its test, to start from."""

from __future__ import annotations

import re
from pathlib import Path

from spmdkit.errors import ConfigError
from spmdkit.foundation.files import write_text

TASK = '''"""A small network that learns a function of two numbers. Replace the data, `init` and `loss_fn`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

WIDTH = 64


def make_data(num, seed):
    x = np.random.default_rng(seed).uniform(-1, 1, size=(num, 2)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, 0]) + x[:, 1]}


def init(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (2, WIDTH)), "down": jax.random.normal(down, (WIDTH,)) / WIDTH}


def predict(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def loss_fn(params, batch, key):
    error = predict(params, batch["x"]) - batch["y"]
    return sk.mean(error**2), {"absolute_error": sk.mean(jnp.abs(error))}


task = sk.Task(init, loss_fn, optax.adam, train_data=make_data(4096, seed=0), eval_data=make_data(512, seed=1))
'''

CONFIG = """# spmdkit train train.yaml          `spmdkit config show train.yaml` lists every setting
task: task.py:task
epochs: 10
batch_size: 64
learning_rate: 1e-2
eval: {every_steps: 100}
# devices: cpu:4                    # fake devices of this machine; omit it on GPUs and TPUs
# mesh: {data: -1}                  # one replica per device
"""

TEST = '''"""Run: python -m pytest test_task.py"""

import jax
import numpy as np
from task import loss_fn, make_data, predict, task

import spmdkit as sk


def test_the_loss_is_the_mean_squared_error():
    params, batch = task.init(jax.random.key(0)), make_data(8, seed=2)
    loss, _ = loss_fn(params, batch, None)
    expected = np.mean((np.asarray(predict(params, batch["x"])) - batch["y"]) ** 2)
    np.testing.assert_allclose(loss.value, expected, rtol=1e-5)


def test_training_lowers_the_loss(tmp_path):
    result = sk.train(task=task, steps=100, learning_rate=1e-2, run_dir=str(tmp_path / "run"), log={"progress": "off"})
    losses = [line["loss"] for line in result.history if line["split"] == "train"]
    assert losses[-1] < losses[0] / 2
'''


def write_project(name: str) -> str:
    """Writes the folder `name`, and returns what to run next.

    Raises:
        ConfigError: it exists, or `name` is not a plain name.
    """
    folder = Path(name)
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is None:
        raise ConfigError(f"new {name!r}: a name has letters, digits, `.`, `_` and `-`. Try spmdkit new digits.")
    if folder.exists():
        raise ConfigError(f"new {name}: {folder} exists. Nothing is overwritten. Choose another name.")
    folder.mkdir()
    for file, text in (("task.py", TASK), ("train.yaml", CONFIG), ("test_task.py", TEST)):
        write_text(folder / file, text)
    return f"spmdkit train {folder}/train.yaml\npython -m pytest {folder}/test_task.py"
