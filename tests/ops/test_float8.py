"""`precision: {matmul: float8}`: products in float8 with delayed scaling, equal on every mesh."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join
from spmdkit.config import parse_config
from spmdkit.errors import ConfigError
from spmdkit.ops.float8 import HISTORY, float8_product
from tests.support.natural_runs import BATCH, STEPS, keep_gradient, leaf_errors, program_of, train

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCAB, CONTEXT = 64, 16
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (BATCH * STEPS, CONTEXT + 1)).astype(np.int32)
random = np.random.default_rng(1)
DATA = {name: random.normal(size=(64, width)).astype(np.float32) for name, width in (("x", 8), ("y", 4))}
FLOAT8 = {"precision": {"matmul": "float8"}}


@pytest.fixture(scope="module")
def task():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        gpt = importlib.import_module("gpt")
        patch.setattr(gpt, "_normal", numpy_normal)
        shape = gpt.Shape(width=32, layers=2, heads=4, kv_heads=4, hidden=64, vocab=VOCAB)

        def loss_fn(params, batch, key):
            x, y = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            return gpt.losses(params, x, y, jnp.ones(x.shape, bool), gpt.Options())

        init = lambda key: gpt.init_params(key, shape)
        optimizer = keep_gradient(optax.adam(1e-2))
        yield sk.Task(init, loss_fn, optimizer, train_data={"tokens": TOKENS}, rules=gpt.rules(shape))


def numpy_normal(key, shape, fan_in):
    """Constants: compiling random numbers takes longer than the step."""
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape) / np.sqrt(fan_in), jnp.float32)


@pytest.fixture(scope="module")
def one_device(task):
    return train(task, {}, **FLOAT8)[1]


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}, {"fsdp": 8}, {"data": 2, "tensor": 4}], ids=str
)
def test_every_mesh_equals_one_device(task, one_device, mesh):
    found = train(task, mesh, **FLOAT8)[1]
    np.testing.assert_allclose(found.losses, one_device.losses, rtol=1e-5)
    for part in ("gradient", "params"):  # both with the histories
        errors = leaf_errors(getattr(found, part), getattr(one_device, part))
        assert max(errors.values()) <= 1e-4, (part, errors)


def test_losses_are_near_those_without_float8(task, one_device):
    program, plain = train(task, {})
    np.testing.assert_allclose(one_device.losses, plain.losses, rtol=0.02)
    assert one_device.losses != plain.losses
    assert not any("float8" in leaf.path for leaf in program.layout)


def test_a_history_has_the_magnitudes_of_each_step(one_device):
    history = one_device.params["blocks"]["float8"]["up"]
    assert history.shape == (2, 3, HISTORY)
    assert (history[:, :, :STEPS] > 0).all() and (history[:, [0, 2], STEPS:] == 0).all()


def test_a_product_is_scaled_by_its_history():
    """Values up to the largest of the history have a relative error of 1/16; larger ones are clipped."""
    x, w = np.array([[1000, 300], [2000, 0]], np.float32), np.eye(2, dtype=np.float32)
    history = np.zeros((3, HISTORY), np.float32)
    history[:, 3] = 1000, 1, 1

    @jax.jit
    def product_and_gradients(g):
        y, pull = jax.vjp(float8_product, x, w, history)
        return y, *pull(g)

    y, dx, dw, new = product_and_gradients(np.full((2, 2), 0.5, np.float32))
    np.testing.assert_allclose(y, [[1000, 300], [1000, 0]], rtol=1 / 16)
    np.testing.assert_allclose((dx, dw), (np.full((2, 2), 0.5), [[1000, 1000], [150, 150]]), rtol=1 / 8)
    np.testing.assert_array_equal(new[:, 0], [2000, 1, 0.5])
    np.testing.assert_array_equal(new[:, 1:], history[:, :-1])


def test_a_run_resumes_bitwise(tmp_path):
    def init(key):
        weights = {"w": jnp.asarray(DATA["x"][:4].T)}
        return weights | sk.float8_histories(weights)

    def loss_fn(params, batch, key):
        return sk.mean((float8_product(batch["x"], params["w"], params["float8"]["w"]) - batch["y"]) ** 2)

    task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA)

    def run(name, steps):
        settings = {"task": "t.py:t", "steps": steps, "batch_size": BATCH, "devices": "cpu:1"} | FLOAT8
        options = {"log": {"progress": "off"}, "run_dir": str(tmp_path / name), "checkpoint": {"every_steps": 2}}
        config = sk.Config(**settings, **options)
        return jax.device_get(sk.train(config, join(detect_cluster({}), config.devices), task).state.params)

    expected = run("whole", 4)
    assert (expected["float8"]["w"][:, :4] > 0).all()
    run("stopped", 2)
    jax.tree.map(np.testing.assert_array_equal, run("stopped", 4), expected)


@pytest.mark.parametrize("settings", [{"mesh": {"pipeline": 2}}, {"sync": {"diloco": {"every": 2}}}], ids=str)
def test_what_adds_histories_is_refused(settings):
    with pytest.raises(ConfigError, match=r"precision.matmul: is float8, and (mesh.pipeline|sync: diloco) adds"):
        parse_config({"task": "t.py:t", "steps": 1, "batch_size": 8} | settings | FLOAT8)


def test_a_task_without_histories_is_refused():
    loss = lambda params, batch, key: sk.mean(batch["x"] @ params["w"])
    task = sk.Task(lambda key: {"w": jnp.ones(3)}, loss, optax.sgd(0.1), train_data={"x": np.ones((16, 3), np.float32)})
    with pytest.raises(ConfigError, match=r"matmul is float8, and init returned no 'float8' leaf.*sk.float8_histories"):
        program_of(task, {}, **FLOAT8)
