"""Losses, evaluation metrics and model state that transform their rows by every kind of FFT, as on one device."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, STEPS, assert_same_run, keep_gradient, train

DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 8, 4)).astype(np.float32)


def init(key):
    return {
        "w": normal(0, 4, 8) / 2,
        "filter": normal(1, 5, 8) / 3,
        "out": normal(2, 8, 8) / 3,
    }


def features(params, rows):
    """A spectral filter along time (rfft, irfft), FNet's mixing (fft2), and a convolution by fft and ifft."""
    hidden = jnp.tanh(rows @ params["w"])
    hidden = hidden + jnp.fft.irfft(jnp.fft.rfft(hidden, axis=1) * params["filter"].astype(jnp.complex64), n=8, axis=1)
    hidden = jnp.tanh(hidden @ params["out"]) + jnp.fft.fft2(hidden).real / 8
    kernel = jnp.fft.fft(params["out"][0])
    return jnp.abs(jnp.fft.ifft(jnp.fft.fft(hidden) * kernel) + 1) + jnp.abs(jnp.fft.fft(hidden @ params["out"])) / 8


def loss_fn(params, rows, key):
    out = features(params, rows)
    return sk.mean((out**2).sum((1, 2))), {"largest": sk.mean(jnp.abs(jnp.fft.rfft(out)).max((1, 2)))}


def eval_fn(params, rows):
    return {"power": sk.mean((jnp.abs(jnp.fft.fft(rows @ params["w"])) ** 2).sum((1, 2)))}


@functools.cache
def run_on(mesh):
    task = sk.Task(
        init, loss_fn, keep_gradient(optax.adam(0.01)), train_data=DATA, eval_data=DATA[:21], eval_fn=eval_fn,
        rules=[("w", [None, "mlp"]), ("out", ["mlp", None])],
    )  # fmt: skip
    program, run = train(task, MESHES.get(mesh, {}), microbatches=2)
    return run, program.eval(program.init())


MESHES = {
    "data 4": {"data": 4},
    "fsdp 4": {"fsdp": 4},
    "data 2 x fsdp 2": {"data": 2, "fsdp": 2},
    "fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
}


@pytest.mark.parametrize("mesh", slow_except(["data 2 x fsdp 2"], MESHES))
def test_every_transform_equals_one_device(mesh):
    run, evaluated = run_on(mesh)
    expected, expected_eval = run_on("one device")
    assert_same_run(run, expected, 2e-5)
    np.testing.assert_allclose(evaluated["power"], expected_eval["power"], rtol=1e-5)
