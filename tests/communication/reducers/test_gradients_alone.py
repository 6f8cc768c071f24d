"""Gradients alone pass the reducer: one that spoils all that it is given leaves loss, counts, metrics, model state and
evaluation as they are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.core_models import keep_gradient, kept_gradient, regression_data
from tests.support.core_runs import ZERO_2_BESIDE_DATA, assert_close, program_of
from tests.support.forms import slow_except
from tests.support.own_reducer import SCALE

ROWS = 40
"""With batches of 32 the second step has 8: counts that differ between replicas, some of which have none."""


def init(key):
    return sk.Variables(
        {"w": jnp.full((16, 8), 0.1), "b": jnp.zeros(8)}, {"mean": jnp.zeros(16), "steps": jnp.int32(0)}
    )


def loss_fn(params, state, batch, key):
    error = jnp.abs((batch["x"] - state["mean"]) @ params["w"] + params["b"] - batch["y"])
    metrics = {
        "mean": sk.mean(error.max(-1)),
        "sum": sk.sum(error),
        "largest": sk.max(error),
        "counts": sk.bincount((error[:, 0] > 1).astype(jnp.int32), 2),
        "root": sk.derived(jnp.sqrt, sk.mean(error[:, 1])),
    }
    rows = jnp.where(sk.example_mask()[:, None], batch["x"], 0.0)
    new = {"mean": 0.9 * state["mean"] + 0.1 * rows.mean(0), "steps": state["steps"] + 1}
    return sk.mean((error**2).sum(-1), weights=batch["weight"]), metrics, new


def by_step(state, batch):
    """The same as a step of the user's own."""
    (loss, metrics, new), grads = sk.value_and_grad(loss_fn)(state.params, state.model_state, batch, state.key)
    return state.apply_gradients(grads, model_state=new), {"loss": loss, **metrics}


def eval_fn(params, state, batch):
    loss, metrics, _ = loss_fn(params, state, batch, None)
    return {"loss": loss, **metrics}


def task(view):
    """Parameters stand still, so that after a spoiled gradient all else can be compared."""
    data, still = regression_data(ROWS, 0), keep_gradient(optax.set_to_zero())
    own = sk.Task(
        init, loss_fn, still, train_data=data, eval_data=data, eval_fn=eval_fn, rules=[("w", ["embed", "mlp"])]
    )
    return own if view == "global" else dataclasses.replace(own, loss_fn=None, train_step=by_step, view=view)


MANUAL = {"mesh": {"replica": 2, "data": 2}}
FORMS = {
    "manual": ("global", MANUAL),
    "mapped": ("global", {"mesh": {"data": 2, "tensor": 2}}),
    "mapped, zero 2": ("global", ZERO_2_BESIDE_DATA),
    "a step of each replica": ("replica", MANUAL),
}


@functools.cache
def trained(form, reducer="sum", input_scale=None):
    """Returns what two steps and an evaluation give: ([metrics of each step], [gradient of each], model state,
    evaluation)."""
    view, mesh = FORMS[form]
    chosen = reducer if input_scale is None else {reducer: {"input_scale": input_scale}}
    program = program_of(task(view), reducer=chosen, steps=2, microbatches=2, data={"drop_remainder": False}, **mesh)
    assert form.startswith(program.form) or view == "replica"
    state, metrics, gradients = program.init(), [], []
    for _, batch in program.batches():
        state, found = program.step(state, batch)
        metrics.append(jax.device_get(found))
        gradients.append(kept_gradient(state))
    return metrics, gradients, jax.device_get(state.model_state), program.eval(state)


@pytest.mark.parametrize(
    ("form", "input_scale"),
    slow_except(
        [("manual", "sum")],
        [
            ("manual", "sum"),
            ("manual", "weighted"),
            ("mapped", "weighted"),
            ("mapped, zero 2", "sum"),
            ("a step of each replica", "sum"),
        ],
    ),
)
def test_faulty_reducer_affects_gradients_only(form, input_scale):
    metrics, gradients, model_state, evaluated = trained(form)
    spoiled = trained(form, "tests.support.own_reducer:spoiling", input_scale)
    assert set(metrics[0]) == set(evaluated) == {"loss", "mean", "sum", "largest", "counts", "root"}
    assert [int(m["counts"].sum()) for m in metrics] == [32, 8]
    for found, expected in zip([*spoiled[0], spoiled[3]], [*metrics, evaluated], strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)
    assert_close(spoiled[2], model_state)
    assert_close(spoiled[1], jax.tree.map(lambda x: SCALE * x, gradients))
