"""A state that is sharded over two processes is gathered, restored, predicted from, and read by orbax alone."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "checkpoints.md"

TASK = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
rows = {"x": x, "i": np.arange(32)}

def init(key):
    return sk.Variables({"w": jax.random.normal(key, (8, 4)), "b": jnp.zeros(4)}, {"seen": jnp.zeros(8)})

def predict_fn(params, state, batch):
    return {"y": (batch["x"] - state["seen"]) @ params["w"] + params["b"], "i": batch["i"]}

def loss_fn(params, state, batch, key):
    return sk.mean((predict_fn(params, state, batch)["y"] ** 2).mean(-1)), {}, {"seen": batch["x"].mean(0)}

def after_step(run, step, state, metrics):
    if step == 4:
        whole = run.gather({"state": state.params, "key": jax.random.key(7), "rng": state.rng})
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(whole))
        np.savez(f"gathered{run.cluster.process_index}.npz", **whole["state"], key=whole["key"])

task = sk.Task(
    init, loss_fn, optax.adam(0.1), train_data=rows, eval_data={k: v[:21] for k, v in rows.items()},
    predict_fn=predict_fn, hooks=[sk.Hook("gather", after_step=after_step, on="all")],
)
"""

CONFIG = """
task: task.py:task
run_dir: run
batch_size: 8
steps: 4
devices: cpu:2
mesh: {fsdp: 2}
layout: {min_shard_bytes: 1}
checkpoint: {every_steps: 2, best: {metric: loss, mode: max}}
eval: {every_steps: 2}
compile_cache: null
"""

JOB = """
import jax
import numpy as np
import spmdkit as sk

program, found = sk.build("run.yaml"), {}
for name, step in {"best": "best", "newest": None, "2": 2}.items():
    state = program.restore(step)
    assert jax.tree.map(lambda x: x.sharding, state) == program.state_sharding
    for part in ("params", "model_state"):
        alone = program.restore(step, what=part)
        same = lambda x, y: x.sharding == y.sharding and np.array_equal(x.addressable_data(0), y.addressable_data(0))
        assert jax.tree.all(jax.tree.map(same, alone, getattr(state, part)))
    (shard,) = state.params["w"].addressable_shards
    found |= {f"{name}/w": shard.data, f"{name}/index": shard.index[0].indices(8)[:2], f"{name}/step": state.step}
predicted = sk.predict("run.yaml", best=True)
np.savez(f"found{jax.process_index()}.npz", **found, **predicted)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, forks):
    folder = tmp_path_factory.mktemp("job")
    for name, text in {"task.py": TASK, "run.yaml": CONFIG, "job.py": JOB}.items():
        (folder / name).write_text(text)
    for command in (["train", "run.yaml"], ["job.py"]):
        ended = forks.together([Process(command, folder)] * 2)
        assert [process.code for process in ended] == [0, 0], "\n".join(process.output for process in ended)
    return folder


def arrays(path):
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def steps(folder):
    """The states of steps 2 and 4, as orbax alone reads them in the lines of the page."""
    code = re.search(r"orbax alone reads .*?```python\n(.*?)```", PAGE.read_text(), re.S)[1]

    def read(step):
        names = {}
        exec(code.replace("first/runs/saved/checkpoints/256", f"{folder}/run/checkpoints/{step}"), names)
        return names["state"]

    return {step: read(step) for step in (2, 4)}


def test_gathered_arrays_are_those_of_the_checkpoint(folder, steps):
    for process in (0, 1):
        found = arrays(folder / f"gathered{process}.npz")
        assert np.array_equal(found.pop("key"), jax.random.key_data(jax.random.key(7)))
        assert all(np.array_equal(x, steps[4]["params"][name]) for name, x in found.items())
        assert found.keys() == {"w", "b"}


def test_each_process_restores_its_shards(folder, steps):
    found = [arrays(folder / f"found{process}.npz") for process in (0, 1)]
    for name, step in {"best": 2, "newest": 4, "2": 2}.items():
        assert [of_process[f"{name}/step"] for of_process in found] == [step, step]
        assert [of_process[f"{name}/index"].tolist() for of_process in found] == [[0, 4], [4, 8]]
        whole = np.concatenate([of_process[f"{name}/w"] for of_process in found])
        assert np.array_equal(whole, steps[step]["params"]["w"])


def test_predictions_equal_those_of_the_whole_state(folder, steps):
    params, seen = steps[2]["params"], steps[2]["model_state"]["seen"]
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)[:21]
    for process in (0, 1):
        found = arrays(folder / f"found{process}.npz")
        assert found["i"].tolist() == list(range(21))
        np.testing.assert_allclose(found["y"], (x - seen) @ params["w"] + params["b"], rtol=1e-5, atol=1e-6)
