"""A task for tests of reducers: constant parameters, an optimizer that sums the gradients, batches of 64 and of 3
rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import spmdkit as sk
from spmdkit.communication.reducers.base import ReduceGroup
from tests.support.core_runs import program_of
from tests.support.fixed_numbers import normal

NUM_VALUES = 128 * 128
"""Size of the large leaf: a multiple of the padding of any buffer here, so that byte formulas are exact."""

MESHES = {
    "data 4": {"mesh": {"data": 4}},
    "data 8": {"mesh": {"data": 8}},
    "replica 2 x data 2": {"mesh": {"replica": 2, "data": 2}},
    "replica 2 x fsdp 2 x tensor 2": {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}},
    "fsdp 4 zero 1": {"mesh": {"fsdp": 4}, "layout": {"zero": 1}},
    "data 2 x fsdp 2 zero 2": {"mesh": {"data": 2, "fsdp": 2}, "layout": {"zero": 2}},
}


def adding():
    """Returns an optimizer without updates. Its state is the sum of all gradients."""
    return optax.GradientTransformation(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda g, total, params=None: (jax.tree.map(jnp.zeros_like, g), jax.tree.map(jnp.add, total, g)),
    )


def loss_fn(params, batch, key):
    h = jnp.tanh(sk.shard(batch["x"] @ params["up"], "batch", "mlp"))
    error = h @ params["down"] + params["bias"] - batch["y"]
    return sk.mean((error**2).sum(-1), weights=batch["weight"]), {"size": sk.mean(jnp.abs(error).sum(-1))}


@functools.cache
def data(num):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(num, 128)), random.normal(size=(num, 8))
    weight = random.uniform(0.5, 2, size=num)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "weight": weight.astype(np.float32)}


def task(optimizer=None, num=67, **changes):
    def init(key):
        return {
            "up": normal(0, 128, 128) / 12,
            "down": normal(1, 128, 8) / 12,
            "bias": jnp.zeros(8),
        }

    given = {"loss_fn": loss_fn, "rules": [("up", ["embed", "mlp"]), ("down", ["mlp", None])]} | changes
    given = {"init": init} | given
    return sk.Task(optimizer=optimizer or adding(), train_data=data(num), **given)


def program(mesh, reducer="sum", own=None, **settings):
    """Returns the program of a task on one of MESHES (or a mapping of settings)."""
    chosen = MESHES[mesh] if isinstance(mesh, str) else mesh
    settings = {"batch_size": 64, "steps": 20, "data": {"drop_remainder": False}} | settings
    return program_of(own or task(), reducer=reducer, **settings, **chosen)


def train(program, steps=20, state=None, start=1):
    """Returns (state, losses) after some steps."""
    state, losses = program.init() if state is None else state, []
    for _, batch in program.batches(start, start + steps - 1):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def wide():
    """Returns a task with one parameter of 128 x 128."""
    return task(
        num=64,
        loss_fn=lambda params, batch, key: sk.mean(((batch["x"] @ params["up"]) ** 2).sum(-1)),
        rules=[],
        init=lambda key: {"up": normal(0, 128, 128)},
    )


@functools.cache
def adam():
    return task(optax.adam(1e-2, eps=1e-3))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


def assert_same_replicas(tree):
    """Asserts that shards with the same index of each leaf are bitwise equal."""
    for leaf in jax.tree.leaves(tree):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(bits) == 1 for bits in by_index.values()), "replicas hold other bits"


def residuals(state):
    """Returns the sum of the error-feedback buffers over replicas, for the first call of a step: a tree like the
    parameters, of numpy arrays."""
    if not state.reducer:
        return jax.tree.map(lambda x: 0.0, state.params)
    is_state = lambda x: isinstance(x, dict) and set(x) <= {"error", "product"}
    total = lambda x: np.asarray(x["error"], np.float64).sum(0) if x else 0.0
    return jax.tree.map(total, jax.device_get(state.reducer[0]), is_leaf=is_state)


def added_up(made, steps=8):
    """Returns (the sum of the gradients that some steps apply, the state after them)."""
    state, _ = train(made, steps)
    return jax.device_get(state.opt_state), state


@functools.cache
def true_sum(mesh):
    """Returns the sum of 8 exact gradients."""
    return added_up(program(mesh))[0]


def applied_and_owed(mesh, reducer):
    """Returns the sum applied by 8 steps, plus the error-feedback buffers after them."""
    applied, state = added_up(program(mesh, reducer))
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) + y, applied, residuals(state))


def alone(made, path="w", num=4, axes=("data",)):
    """Returns `(leaves [num, *leaf], states) -> (sums, new states)` over `num` devices, outside a step."""

    def local(leaves, states):
        over = ReduceGroup(axes, num, lambda: jax.random.key(7), (path,) * len(leaves))
        leaves, new = made.apply([x[0] for x in leaves], jax.tree.map(lambda x: x[0], states), over)
        return leaves, jax.tree.map(lambda x: x[None], new)

    devices, rows = np.array(jax.devices()[:num]), PartitionSpec(axes)
    mesh = Mesh(devices.reshape(*[2] * (len(axes) - 1), -1), axes)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=(PartitionSpec(), rows)))
    return lambda terms, states=None: jax.device_get(run(terms, states or [{} for _ in terms]))
