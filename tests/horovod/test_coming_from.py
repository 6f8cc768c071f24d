"""Each row of docs/coming_from: the code under "spmdkit" runs on fake devices, and has the result of one device."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join

pytestmark = pytest.mark.promotes("the page writes plain jnp")
PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming_from").glob("*.md"))

PRELUDE = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
y = (2 * x.sum(1, keepdims=True) + 0.5).astype(np.float32)
train_data = {"x": x, "y": y}
eval_data = {"x": x[:21], "y": y[:21]}


def init(key):
    return {"w": jax.random.normal(key, (3, 1)) * 0.1, "b": jnp.zeros(1)}


def loss_fn(params, batch, key):
    return sk.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def eval_fn(params, batch):
    return {"loss": loss_fn(params, batch, None)}
"""
TASK = (
    "\ntask = sk.Task(init, loss_fn, lambda learning_rate=0.1: optax.sgd(learning_rate), train_data=train_data, "
    "eval_data=eval_data, eval_fn=eval_fn)\n"
)
BASE = {"task": "task.py:task", "run_dir": "run", "steps": 6, "batch_size": 16, "devices": "cpu:8", "checkpoint": None}
BASE |= {"log": {"every_steps": 2}}
NEAR = {"horovod: 4: wrap the optimizer": 2e-2, "ddp: Communication hooks": 2e-2}  # their reducer rounds
OTHER = ("stale updates", "asynchronous", "keras: Callbacks")  # the page says that the trajectory differs


def rows():
    """Returns page: title -> [(language, text)] of the right-hand cell."""
    found = {}
    for page in PAGES:
        for part in page.read_text().split("\n## ")[1:]:
            title, _, rest = part.partition("\n")
            if rest.startswith("\n::::{grid}"):
                ours = rest.split(":::{grid-item}")[2].split("\n:::\n")[0]
                blocks = re.findall(r"```\{code-block\} (\w+)\n(.*?)\n```", ours, re.DOTALL)
                found[f"{page.stem}: {title}"] = blocks
    return found


ROWS = rows()
SIX_STEPS = "horovod: The six steps with hvd's names"


def config_of(title):
    """Returns the settings of a row over those of all."""
    merged = dict(BASE)
    for language, text in ROWS[title]:
        merged |= yaml.safe_load(text) if language == "yaml" else {}
    return merged


def write(folder, title):
    """Writes the task and what the row adds to it; a block that names a file is that file."""
    code = ""
    for language, text in ROWS[title]:
        named = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and named:
            (folder / named.group(1)).write_text(text)
        elif language == "python" and ("def " in text or "sk.Task" in text):
            code += f"\n{text}\n"
    (folder / "task.py").write_text(PRELUDE + code + ("" if "task = " in code else TASK))
    (folder / "row.yaml").write_text(yaml.safe_dump(config_of(title)))


def trained(folder, *overrides):
    """Returns the `Result` of the config in a folder."""
    config = sk.load_config(folder / "row.yaml", overrides)
    return sk.train(config, join(detect_cluster({}), config.devices))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Returns the parameters after six steps on one device, at a batch of 16."""
    folder = tmp_path_factory.mktemp("one")
    write(folder, "tf_distribute: OneDeviceStrategy")
    return jax.device_get(trained(folder).state.params)


@pytest.mark.forms(5)
@pytest.mark.parametrize("title", [title for title in ROWS if title != SIX_STEPS])
def test_a_row_gives_what_one_device_gives(title, tmp_path, one_device, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, title)
    overrides = ["batch_size=16"] if config_of(title)["batch_size"] == 64 else []
    result = trained(tmp_path, *overrides)
    assert int(result.state.step) == (3 if "SessionRunHook" in title else 6)
    params = jax.device_get(result.state.params)
    if not any(part in title for part in OTHER) and "SessionRunHook" not in title:
        for name, value in one_device.items():
            np.testing.assert_allclose(params[name], value, rtol=NEAR.get(title, 1e-5), atol=1e-6, err_msg=name)
    for language, text in ROWS[title]:
        if language == "python" and "def " not in text and "sk.Task" not in text:
            tf_config = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
            exec(text, {"tf_config": tf_config, "config": tmp_path / "row.yaml"})


def test_six_horovod_steps_match_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((_, text),) = ROWS[SIX_STEPS]
    names = {}
    exec(PRELUDE, names)
    params = jax.device_get(names["init"](jax.random.key(0)))
    names["batches"] = [{k: v[i : i + 16] for k, v in names["train_data"].items()} for i in range(0, 64, 16)]
    exec(text, names)
    names["hvd"].shutdown()
    for batch in names["batches"]:
        error = batch["x"] @ params["w"] + params["b"] - batch["y"]
        params = {"w": params["w"] - 0.2 * batch["x"].T @ error / 16, "b": params["b"] - 0.2 * error.mean(0)}
    saved = np.load(tmp_path / "checkpoint.npz")
    for name, value in params.items():
        np.testing.assert_allclose(saved[name], value, rtol=1e-5, err_msg=name)


FRAMEWORKS = {"accelerate", "ddp", "horovod", "keras", "levanter", "lightning", "maxtext", "supervisor"}


def test_every_framework_has_its_rows():
    assert {title.partition(":")[0] for title in ROWS} == FRAMEWORKS | {"tf_distribute"}
    strategies = {title.partition(": ")[2].partition(" ")[0].rstrip(",") for title in ROWS if "tf_distribute" in title}
    names = ("OneDevice", "Mirrored", "CentralStorage", "MultiWorkerMirrored", "TPU", "ParameterServer")
    assert {f"{name}Strategy" for name in names} <= strategies
