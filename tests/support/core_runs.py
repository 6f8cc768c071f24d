"""Runs a task for a few steps and compares two runs, with one tolerance."""

import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

import spmdkit as sk
from spmdkit.foundation.trees import named_leaves
from spmdkit.program.program import Program
from tests.support.core_models import BATCH, MODELS, kept_gradient

TOLERANCE = 1e-5
"""Relative 2-norm, float32."""

MESHES: dict[str, Any] = {
    "data 8": {"mesh": {"data": 8}},
    "replica 2 x data 4": {"mesh": {"replica": 2, "data": 4}},
    "fsdp 8 zero 1": {"mesh": {"fsdp": 8}, "layout": {"zero": 1}},
    "fsdp 8 zero 2": {"mesh": {"fsdp": 8}, "layout": {"zero": 2}},
    "fsdp 8 zero 3": {"mesh": {"fsdp": 8}},
    "data 2 x fsdp 4": {"mesh": {"data": 2, "fsdp": 4}},
    "data 2 x fsdp 4 zero 2": {"mesh": {"data": 2, "fsdp": 4}, "layout": {"zero": 2}},
    "tensor 4 x data 2": {"mesh": {"tensor": 4, "data": 2}},
    "data 2 x fsdp 2 x tensor 2": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
}
ZERO_2_BESIDE_DATA = MESHES["data 2 x fsdp 4 zero 2"]


class Run(NamedTuple):
    """The result of a run: numbers on the host, and the text of its compiled program."""

    losses: list[float]
    metrics: dict[str, float]
    gradient: Any
    params: Any
    model_state: Any
    eval: dict[str, float] | None
    form: str
    hlo: str


def program_of(task, **settings):
    """Returns the program of a task on eight devices, or on one for an empty mesh. Small leaves are also sharded."""
    settings = {"batch_size": BATCH, "steps": 5, "mesh": {}} | settings
    if "fsdp" in settings["mesh"] and settings.get("layout", {}).get("fsdp") != "off":
        settings["layout"] = {"min_shard_bytes": 1} | settings.get("layout", {})
    num = np.prod([1, *settings["mesh"].values()])
    return Program(sk.Config(task="t.py:t", **settings), task, jax.devices()[: abs(int(num))])


def train(program, evaluate=True, steps=5):
    """Returns the `Run` of a program over its first steps; `gradient` is that of the first one."""
    state, losses, gradient, metrics = program.init(), [], None, {}
    for step, batch in program.batches(stop=steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        gradient = kept_gradient(state) if step == 1 else gradient
    return Run(
        losses,
        {name: float(x) for name, x in metrics.items()},
        gradient,
        jax.device_get(state.params),
        jax.device_get(state.model_state),
        program.eval(state) if evaluate else None,
        program.form,
        program.compiled.as_text(),
    )


@functools.cache
def one_device(model, microbatches=1):
    """Returns the reference run of a model. Cached."""
    return train(program_of(MODELS[model](), microbatches=microbatches))


@functools.cache
def on_mesh(model, mesh, microbatches):
    """Returns the run of a model on one of MESHES, evaluated once. Cached."""
    program = program_of(MODELS[model](), microbatches=microbatches, **MESHES[mesh])
    return train(program, evaluate=microbatches == 4)


def leaf_errors(found, expected):
    """Returns path -> relative 2-norm error. The denominator is at least a thousandth of the tree's norm."""
    found, expected = ({p: np.asarray(x, np.float64) for p, x in named_leaves(t)} for t in (found, expected))
    assert found.keys() == expected.keys()
    whole = np.sqrt(sum(np.sum(x**2) for x in expected.values()))
    return {
        path: np.linalg.norm(found[path] - x) / max(np.linalg.norm(x), 1e-3 * whole, 1e-30)
        for path, x in expected.items()
    }


def assert_close(found, expected, tolerance=TOLERANCE):
    """Asserts that the leaves of two trees are equal within the tolerance."""
    wrong = {path: error for path, error in leaf_errors(found, expected).items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance}: {wrong}"


def assert_same_run(found, expected, tolerance=TOLERANCE):
    """Asserts that two runs have the same losses, metrics, gradient, parameters, model state and evaluation."""
    assert_close(found.gradient, expected.gradient, tolerance)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    assert_close(found.params, expected.params, tolerance)
    assert_close(found.model_state, expected.model_state, tolerance)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(found.metrics[name], value, rtol=tolerance, err_msg=name)
    if found.eval is not None and expected.eval is not None:
        assert found.eval.keys() == expected.eval.keys()
        for name, value in expected.eval.items():
            np.testing.assert_allclose(found.eval[name], value, rtol=tolerance, err_msg=name)


def values_saved(program, layers=3):
    """Returns (shape, whether it is on the host) -> number of values that the forward scan over layers saves."""
    scans = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan" and eqn.params["length"] == layers:
                scans.append([v.aval for v in eqn.outvars[eqn.params["num_carry"] :]])
            for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
                    walk(getattr(x, "jaxpr", x))

    walk(program.traced.jaxpr.jaxpr)
    return Counter((x.shape[1:], "host" in str(x)) for x in scans[0])
