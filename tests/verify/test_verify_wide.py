"""Complex leaves, half precision and leaves without numbers: compared as what they are, with no false alarm and none
missed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.verify.noise import leaf_errors
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import Setting, TaskRunner
from tests.natural import test_odd_leaves as odd
from tests.support.forms import slow_except

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

REPLICAS = ("replica", "data")


def own_phase(params, state, rows, key):
    """The imaginary part of the new spectrum is of one replica's rows: it is the loudest of its numbers."""
    loss, metrics, new = odd.loss_fn(params, state, rows, key)
    own = jnp.abs(jnp.fft.fft(rows).mean(0).imag)
    return loss, metrics, new | {"spectrum": lax.complex(new["spectrum"].real, own)}


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [pytest.param(odd.loss_fn, marks=pytest.mark.slow), own_phase])
def test_a_task_with_complex_half_and_empty_leaves(loss_fn):
    agree = {"spectrum": "mean"} if loss_fn is own_phase else {}  # without it the task is refused
    task = sk.Task(odd.init, loss_fn, optax.sgd(0.1), train_data=odd.DATA, state_reduction=agree)
    config = sk.Config(task="t.py:t", batch_size=16, data={"shuffle": False})
    found = CaseRunner(TaskRunner(config, task, 16, 2), locate="cases").case({"data": 4}, 1, whole=True)
    if loss_fn is odd.loss_fn:
        assert found["passed"] and found["state_error"] < 1e-6, found
    else:
        assert found.get("failed") == ["state"] and found["diagnosis"]["kind"] == "model state", found
        assert "spectrum" in found["worst_leaf"]


def test_errors_of_complex_and_half_leaves():
    random = np.random.default_rng(0)
    x = (random.normal(size=8) + 1j * random.normal(size=8)).astype(np.complex64)
    assert leaf_errors({"x": x}, {"x": x})["x"] == 0 and leaf_errors({"x": x.conj()}, {"x": x})["x"] > 0.5
    half = np.asarray(jnp.asarray(random.normal(size=64), jnp.bfloat16))
    next_one = np.asarray(jnp.nextafter(jnp.asarray(half), jnp.asarray(np.inf, jnp.bfloat16)))
    assert leaf_errors({"x": next_one}, {"x": half})["x"] == 0
    assert leaf_errors({"x": (half.astype(np.float32) * 1.1).astype(half.dtype)}, {"x": half})["x"] > 0.05


def of_a_wave(cast):
    """A loss over complex examples, with a complex average in the state."""

    def loss_fn(params, state, rows, key):
        out = rows @ lax.complex(params["re"], params["im"])
        mean = 0.5 * state["mean"] + 0.5 * lax.pmean(out.mean(0), REPLICAS)
        return sk.mean((jnp.abs(out - state["mean"]) ** 2).sum(-1)), {}, {"mean": mean.astype(cast or mean.dtype)}

    def init(key):
        re, im = jax.random.normal(key, (2, 4, 3))
        return sk.Variables({"re": re, "im": im}, {"mean": jnp.zeros(3, jnp.complex64)})

    rows = (odd.DATA[:, :4] + 1j * odd.DATA[:, 4:]).astype(np.complex64)
    return sk.Task(init, loss_fn, optax.sgd(0.1), train_data=rows)


@pytest.mark.parametrize(
    "cast", [None, pytest.param(jnp.complex64, marks=pytest.mark.slow)], ids=["as it is", "casting"]
)
def test_in_64_bits_complex_numbers_are_wide_too(cast):
    jax.config.update("jax_enable_x64", True)
    try:
        config = sk.Config(task="t.py:t", batch_size=16, data={"shuffle": False})
        case_runner = CaseRunner(TaskRunner(config, of_a_wave(cast), 16, 2, dtype="float64"))
        found = case_runner.case({"data": 2}, 1, whole=False)
        dtype = case_runner.reference(Setting({})).dtype
    finally:
        jax.config.update("jax_enable_x64", False)
    assert found["passed"] and found["gradient_error"] < 1e-14, found
    assert dtype == ("float32" if cast else "float64")


def half_and_complex(devices, fault=""):
    """A step in bfloat16 with a complex average in its state, on axes of names of its own."""
    mesh = Mesh(devices, ("rows", "columns"))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    random = np.random.default_rng(0)

    def of_shard(rows):
        own = jnp.fft.fft(rows).mean(0)
        mean = lax.pmean(own, "rows")
        return lax.complex(mean.real, lax.pmax(own.imag, "rows")) if fault == "phase" else mean

    average = jax.shard_map(of_shard, mesh=mesh, in_specs=P("rows"), out_specs=P())

    def train_step(state, rows):
        def loss_fn(w):
            loss = jnp.mean((rows.astype(jnp.bfloat16) @ w).astype(jnp.float32) ** 2)
            return loss * mesh.shape["rows"] if fault == "factor" else loss

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        new = {"w": state["w"] - 0.1 * grads, "spectrum": 0.5 * state["spectrum"] + 0.5 * average(rows)}
        return new, loss, grads

    w = put(jnp.asarray(random.normal(size=(8, 4)) / 3, jnp.bfloat16), None, "columns")
    state = {"w": w, "spectrum": put(jnp.ones(8, jnp.complex64))}
    return jax.jit(train_step), (state, put(random.normal(size=(16, 8)).astype(np.float32), "rows", None))


@pytest.mark.parametrize(
    ("fault", "first"), slow_except([("phase", "state")], [("", None), ("phase", "state"), ("factor", "loss")])
)
def test_external_step_with_complex_and_half_leaves(fault, first):
    report = sk.verify_step(
        lambda devices: half_and_complex(devices, fault), meshes=[{"rows": 2, "columns": 2}], steps=2
    )
    assert report["passed"] == (not fault), str(report)
    if fault:
        assert report["cases"][0]["failed"][0] == first, str(report)
    else:
        assert report["cases"][0]["gradient_error"] < 0.03 and not report["below_noise"], str(report)
