"""One device of the default platform, the GPU in benchmarks/gpu.py, computes what a CPU does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join
from spmdkit.program.program import Program
from tests.support.core_models import made_once

WIDTH, HEADS, CONTEXT, VOCAB = 32, 2, 16, 61
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (16, CONTEXT + 1)).astype(np.int32)


@pytest.fixture
def task(load_example):
    gpt = load_example("gpt")
    shape = gpt.Shape(WIDTH, 1, HEADS, HEADS, 2 * WIDTH, VOCAB)

    def loss_fn(params, batch, key):
        x, y = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        return gpt.losses(params, x, y, jnp.ones(x.shape, bool), gpt.Options())

    init = lambda key: gpt.init_params(key, shape)
    return made_once(sk.Task(init, loss_fn, optax.adam(1e-2), train_data={"tokens": TOKENS}))


def config(**settings):
    return sk.Config(
        **{"task": "t.py:t", "steps": 4, "batch_size": 8, "devices": [0], "log": {"progress": "off"}} | settings
    )


def run_on(task, device, **settings):
    """Returns (losses, parameters)."""
    with jax.default_matmul_precision("highest"):  # a GPU multiplies float32 as TF32
        program = Program(config(**settings), task, [device])
        state, losses = program.init(), []
        for _, batch in program.batches():
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


def assert_close(found, expected, rtol):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


def test_losses_equal_those_of_a_cpu(task):
    device = jax.devices()[0]
    (losses, params), (expected, on_cpu) = run_on(task, device), run_on(task, jax.devices("cpu")[-1])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(params, on_cpu, 1e-4)
    np.testing.assert_allclose(run_on(task, device, precision="bfloat16")[0], expected, rtol=0.02)


def test_attention_of_the_device_equals_float32():
    q, k, v = (jax.random.normal(key, (2, 128, 2, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))

    def loss(implementation, q, k, v):
        return jnp.sin(sk.attention(q, k, v, implementation=implementation).astype(jnp.float32)).sum()

    gradient = lambda implementation, *of: jax.jit(jax.grad(lambda *x: loss(implementation, *x), (0, 1, 2)))(*of)
    with jax.default_matmul_precision("highest"):
        expected = gradient("xla", *(x.astype(jnp.float32) for x in (q, k, v)))
    assert_close([np.asarray(x, np.float32) for x in gradient("auto", q, k, v)], jax.device_get(expected), 0.02)


def test_a_run_continues_from_its_checkpoint(tmp_path):
    def loss_fn(params, batch, key):
        return sk.mean((jnp.tanh(batch["x"] @ params["w"]).sum(axis=1) - 1) ** 2)

    x = np.random.default_rng(1).standard_normal((16, WIDTH)).astype(np.float32)
    init = lambda key: {"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH}
    task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data={"x": x})

    def train(name, steps):
        options = {"run_dir": str(tmp_path / name), "checkpoint": {"every_steps": 2}}
        settings = config(steps=steps, **options)
        return jax.device_get(sk.train(settings, join(detect_cluster({}), settings.devices), task).state.params)

    expected = train("whole", 4)
    train("stopped", 2)
    np.testing.assert_array_equal(train("stopped", 4)["w"], expected["w"])
