"""Runs an external program twice: with spmdkit on a mesh, and with a manual loop in plain JAX."""

from typing import Any, NamedTuple

import jax
import jax.extend
import numpy as np
import optax

import spmdkit as sk
from spmdkit.foundation.trees import named_leaves
from spmdkit.program.program import Program

TOLERANCE = 1e-5
"""Relative 2-norm, float32."""

BATCH, STEPS = 16, 3

MESHES: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {}},
    "data 8": {"mesh": {"data": 8}},
    "replica 2 x data 4": {"mesh": {"replica": 2, "data": 4}},
    "fsdp 8 zero 3": {"mesh": {"fsdp": 8}},
    "fsdp 8 zero 2": {"mesh": {"fsdp": 8}, "layout": {"zero": 2}},
    "data 2 x fsdp 4": {"mesh": {"data": 2, "fsdp": 4}},
    "data 2 x fsdp 2 x tensor 2": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
}
REPLICAS = [name for name in MESHES if name.startswith(("data", "replica"))] + ["fsdp 8 zero 2"]
"""Meshes with more than one replica."""


class Run(NamedTuple):
    """Losses and metrics of every step, the gradient of the first step, and the state after the last step."""

    losses: list[float]
    metrics: list[dict[str, float]]
    gradient: Any
    params: Any
    model_state: Any = None


def keep_gradient(optimizer):
    """Returns `optimizer` with an additional state, first in its chain: the gradient of the last step."""
    keep = optax.GradientTransformation(
        init=lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        update=lambda grads, state, params=None: (grads, grads),
    )
    return optax.chain(keep, optimizer)


def program_of(task, mesh="one device", **settings):
    """Returns the program of a task on one of MESHES, or on axes of these sizes. Small leaves are also sharded, and
    rows are not shuffled."""
    on_mesh = MESHES[mesh] if isinstance(mesh, str) else {"mesh": mesh}
    settings = {"batch_size": BATCH, "steps": STEPS, "data": {"shuffle": False}} | on_mesh | settings
    if "fsdp" in settings["mesh"]:
        settings["layout"] = {"min_shard_bytes": 1} | settings.get("layout", {})
    num = int(np.prod([1, *settings["mesh"].values()]))
    return Program(sk.Config(task="t.py:t", **settings), task, jax.devices()[:num])


def train(task, mesh="one device", **settings):
    """Returns (program, `Run`) of a task with an optimizer that stores its gradient."""
    program = program_of(task, mesh, **settings)
    state, losses, metrics, gradient = program.init(), [], [], None
    for step, batch in program.batches():
        state, found = program.step(state, batch)
        metrics.append({name: float(x) for name, x in found.items()})
        losses.append(metrics[-1].get("loss"))
        gradient = jax.device_get(state.opt_state[0]) if step == 1 else gradient
    return program, Run(losses, metrics, gradient, jax.device_get(state.params), jax.device_get(state.model_state))


def by_hand(loss_fn, params, data, optimizer, steps=STEPS):
    """Returns the `Run` of plain JAX: `loss_fn(params, batch) -> (loss, metrics)` over the batches in order."""

    @jax.jit
    def stepped(params, opt_state, batch):
        (loss, more), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, grads, {"loss": loss} | more

    opt_state, losses, metrics, first = jax.jit(optimizer.init)(params), [], [], None
    for step in range(steps):
        batch = jax.tree.map(lambda x: x[step * BATCH : (step + 1) * BATCH], data)  # noqa: B023 - used immediately
        params, opt_state, grads, found = stepped(params, opt_state, batch)
        first = grads if step == 0 else first
        losses.append(float(found["loss"]))
        metrics.append({name: float(x) for name, x in found.items()})
    return Run(losses, metrics, jax.device_get(first), jax.device_get(params))


def leaf_errors(found, expected):
    """Returns path -> relative 2-norm error. The denominator is at least a thousandth of the tree's norm."""
    found, expected = ({p: np.asarray(x, np.float64) for p, x in named_leaves(t)} for t in (found, expected))
    assert found.keys() == expected.keys()
    whole = np.sqrt(sum(np.sum(x**2) for x in expected.values()))
    return {p: np.linalg.norm(found[p] - x) / max(np.linalg.norm(x), 1e-3 * whole, 1e-30) for p, x in expected.items()}


def assert_same_run(found, expected, tolerance=TOLERANCE):
    """Asserts that two runs have the same losses, metrics, gradient and parameters."""
    for what in ("gradient", "params"):
        errors = leaf_errors(getattr(found, what), getattr(expected, what))
        wrong = {path: float(error) for path, error in errors.items() if not error <= tolerance}
        assert not wrong, f"{what}: relative errors above {tolerance}: {wrong}"
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    for mine, right in zip(found.metrics, expected.metrics, strict=True):
        for name, value in right.items():
            np.testing.assert_allclose(mine[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_replicas_hold_the_same_bits(tree):
    """Asserts that all copies of an array on the devices are bitwise equal."""
    for path, leaf in named_leaves(tree):
        copies = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert copies.setdefault(str(shard.index), bits) == bits, f"{path} differs between devices"


def num_psums(program):
    """Returns the number of arrays that the traced step sums over replicas: one operation per array, which XLA combines
    into one reduction."""

    def count(jaxpr):
        own = sum(len(eqn.invars) for eqn in jaxpr.eqns if eqn.primitive.name.startswith("psum"))
        return own + sum(count(inner) for eqn in jaxpr.eqns for inner in jax.extend.core.jaxprs_in_params(eqn.params))

    return count(program.traced.jaxpr.jaxpr)
