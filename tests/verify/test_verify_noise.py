"""What is rounding noise is no alarm: parameters without a gradient under optimizers that divide by its size; a fault
beside them is seen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from spmdkit.verify import noise
from spmdkit.verify.task_runner import Setting
from tests.support import verify_models as models

pytestmark = pytest.mark.promotes("flax, equinox and optax promote, as users' models do")

BELOW = {
    "gpt2": {"layer0/qkv_bias": (8, 24)},
    "flax_cnn": {"Conv_0/bias": (4, 4), "Conv_1/bias": (8, 8)},
    "equinox": {"attention/key_proj/bias": (8, 8)},
}
"""Parameters whose true gradient is zero, with (numbers, of how many) that are."""


@pytest.mark.forms(1)
@pytest.mark.parametrize("model", models.MODELS)
def test_parameters_without_gradient_are_named_as_noise(model):
    case_runner = models.case_runner(model)
    found = case_runner.case({"data": 4}, 1, whole=True)
    assert found["passed"], str(found)
    reference = case_runner.reference(Setting({}))
    assert reference.noise.leaves == BELOW[model]
    assert reference.tolerance["parameter"] < 1e-4  # of all others as sharp as ever
    assert found["update_error"] < 1e-3 and found["parameter_error"] < 1e-5


@pytest.mark.slow
def test_sgd_makes_no_steps_of_noise():
    case_runner = models.case_runner("gpt2", "sgd", 0.1)
    assert case_runner.case({"data": 2, "fsdp": 2}, 1, whole=False)["passed"]
    noisy = case_runner.reference(Setting({})).noise
    assert noisy.leaves == {}


def wrong_rate(optimizer, leaf):
    """Returns the optimizer with a fault that is there on several devices only: one leaf's update is 1.1 times as
    large."""

    def update(grads, state, params=None):
        updates, state = optimizer.update(grads, state, params)
        factor = 1.0 if len(params_devices) == 1 else 1.1
        changed = lambda path, x: x * factor if jax.tree_util.keystr(path, simple=True, separator="/") == leaf else x
        return jax.tree_util.tree_map_with_path(changed, updates), state

    params_devices = [0]
    return optax.GradientTransformation(optimizer.init, update), params_devices


@pytest.mark.parametrize("leaf", [pytest.param("layer0/out", marks=pytest.mark.slow), "layer0/qkv_bias"])
def test_optimizer_fault_is_found_next_to_noise(leaf):
    optimizer, devices = wrong_rate(optax.adam(1e-3), leaf)
    case_runner = models.new_case_runner(models.gpt2(optimizer))
    case_runner.reference(Setting({}))
    devices.append(1)
    found = case_runner.case({"data": 2}, 1, whole=False)
    assert not found["passed"] and "gradient" not in found["failed"]
    assert found["worst_leaf"] == leaf and found["diagnosis"]["kind"] == "optimizer"


@pytest.mark.slow
def test_gradient_of_a_leaf_without_one_is_found():
    """On two devices the bias of the keys gets a gradient."""
    right = models.gpt2(optax.adam(1e-3))

    def loss_fn(params, batch, key):
        replica = lax.axis_index("data")  # 0 on one device
        return right.loss_fn(params, batch, key) * (1 + replica * jnp.sum(params["layer0"]["qkv_bias"][8:16]))

    found = models.new_case_runner(dataclasses.replace(right, loss_fn=loss_fn)).case({"data": 2}, 1, whole=False)
    assert not found["passed"] and "gradient" in found["failed"] and found["worst_leaf"] == "layer0/qkv_bias"


def test_steps_of_noise_are_bounded_by_their_size():
    expected = {"b": np.array([1e-3, -1e-3, 5.0])}
    mask, bounds = {"b": np.array([True, True, False])}, {"b": 4e-3}
    flipped, ten_times = {"b": np.array([-1e-3, 1e-3, 5.0])}, {"b": np.array([1e-2, 1e-2, 5.0])}
    assert noise.leaf_errors(flipped, expected, mask, bounds) == {"b": 0.0}
    assert noise.leaf_errors(ten_times, expected, mask, bounds)["b"] > 1e-3
    assert noise.leaf_errors(flipped, expected)["b"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.float32], ids=["promoting", "casting"])
def test_model_that_casts_is_verified_in_float64(dtype):
    """flax's batch norm computes its statistics in float32 at least, whatever its state was made in."""
    jax.config.update("jax_enable_x64", True)
    try:
        case_runner = models.new_case_runner(models.cnn(optax.sgd(0.1), dtype), "float64")
        found = case_runner.case({"data": 2}, 1, whole=False)
        reference = case_runner.reference(Setting({}))
    finally:
        jax.config.update("jax_enable_x64", False)
    assert found["passed"], str(found)
    assert reference.dtype == ("float64" if dtype is None else "float32")
    assert (found["gradient_error"] < 1e-9) == (dtype is None)
