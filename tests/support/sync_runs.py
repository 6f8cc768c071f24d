"""Runs of groups of replicas on a small task, and a manual reference: a loop over groups in plain JAX on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdkit.communication.sync.diloco import fragments_of
from tests.support.core_runs import program_of
from tests.support.reducer_runs import task

MESHES = {
    "data 4": {"mesh": {"data": 4}},
    "replica 2 x data 2": {"mesh": {"replica": 2, "data": 2}},
    "replica 2 x fsdp 2 x tensor 2": {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}},
}
SIZES = {"bias": 8, "down": 128 * 8, "up": 128 * 128}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def adam():
    return optax.adam(1e-2, eps=1e-3)


def program(sync, mesh="data 4", optimizer=None, **settings):
    """Returns the program of a sync on one of MESHES (or sizes of axes)."""
    chosen = MESHES[mesh] if isinstance(mesh, str) else {"mesh": mesh}
    settings = {"batch_size": 16, "steps": 40} | settings | chosen
    return program_of(task(optimizer or adam(), num=64), sync=sync, **settings)


def train(made, steps, state=None, start=1):
    """Returns (state, losses) after some steps."""
    state, losses = made.init() if state is None else state, []
    for _, batch in made.batches(start, start + steps - 1):
        state, metrics = made.step(state, batch)
        losses.append(float(made.metrics(metrics)["loss"]))
    return state, losses


def group(tree, number):
    """Returns one group's copy of a tree, on the host."""
    return jax.tree.map(lambda x: np.asarray(x)[number], jax.device_get(tree))


def mean_of_groups(tree):
    return jax.tree.map(lambda x: np.asarray(x).mean(0), jax.device_get(tree))


def loss_by_hand(params, batch):
    error = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"] - batch["y"]
    return ((error**2).sum(-1) * batch["weight"]).sum() / batch["weight"].sum()


def diloco_by_hand(made, steps, every, fragments=1, overlap=0, alpha=None, outer=NESTEROV):
    """Returns (parameters of each group, the outer parameters)."""
    inner = adam()
    mix = (0.5 if overlap else 0.0) if alpha is None else alpha

    @jax.jit
    def one(params, state, batch):
        updates, state = inner.update(jax.grad(loss_by_hand)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    outer_update = jax.jit(outer.update)
    agreed, num = group(made.init().params, 0), made.groups.num
    owner = dict(zip(SIZES, fragments_of(list(SIZES.values()), fragments), strict=True))
    outer_states = {name: outer.init(x) for name, x in agreed.items()}
    params, states, taken = [dict(agreed) for _ in range(num)], [inner.init(agreed)] * num, {}
    for step, batch in made.batches(1, steps):
        rows = jax.tree.map(np.asarray, batch.examples)
        for g in range(num):
            own = jax.tree.map(lambda x, g=g: x[g * len(x) // num : (g + 1) * len(x) // num], rows)
            moved, states[g] = one(params[g], states[g], own)
            params[g] = jax.device_get(moved)
        for name, fragment in owner.items():
            since = step - (every + fragment * every // fragments)
            if since >= 0 and since % every == 0:
                taken[name] = agreed[name] - sum(p[name] for p in params) / num
            if since - overlap >= 0 and (since - overlap) % every == 0:
                update, outer_states[name] = outer_update(taken[name], outer_states[name], agreed[name])
                agreed[name] = agreed[name] + np.asarray(update)
                for p in params:
                    p[name] = mix * p[name] + (1 - mix) * agreed[name]
    return params, agreed
