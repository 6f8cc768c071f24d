"""A GAN: two networks against each other, each with its own optimizer."""

import jax
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import STEPS, batches, step_key

# ---- shared ----------------------------------------------------------------------------------------------------------

DATA = np.random.default_rng(0).normal(1.0, 0.5, size=(64, 8)).astype(np.float32)
opt = {"G": optax.adam(1e-3, b1=0.5), "D": optax.adam(2e-3, b1=0.5)}


def init(key):
    keys = jax.random.split(key, 4)
    net = lambda k1, k2, n: {"w1": jax.random.normal(k1, (8, 16)) / 3, "w2": jax.random.normal(k2, (16, n)) / 4}
    return {"G": net(keys[0], keys[1], 8), "D": net(keys[2], keys[3], 1)}


def apply(net, x):
    return jax.nn.leaky_relu(x @ net["w1"], 0.2) @ net["w2"]


def d_loss(D, G, x, z):
    return jax.nn.softplus(-apply(D, x))[:, 0] + jax.nn.softplus(apply(D, apply(G, z)))[:, 0]


def g_loss(G, D, z):
    return jax.nn.softplus(-apply(D, apply(G, z)))[:, 0]


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, x, z):
    G, D = params["G"], params["D"]
    dl, grads = jax.value_and_grad(lambda D: d_loss(D, G, x, z).mean())(D)
    updates, d_state = opt["D"].update(grads, opt_state["D"], D)
    D = optax.apply_updates(D, updates)
    gl, grads = jax.value_and_grad(lambda G: g_loss(G, D, z).mean())(G)
    updates, g_state = opt["G"].update(grads, opt_state["G"], G)
    return {"G": optax.apply_updates(G, updates), "D": D}, {"G": g_state, "D": d_state}, dl + gl


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = {k: opt[k].init(params[k]) for k in opt}
    for step, x in enumerate(batches(DATA)):
        z = jax.random.normal(step_key(step), (len(x), 8))
        params, opt_state, loss = plain_step(params, opt_state, x, z)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------

both = optax.GradientTransformation(lambda p: {k: opt[k].init(p[k]) for k in p}, None)


def train_step(state, x):
    (G, D), opt_state = (state.params["G"], state.params["D"]), state.opt_state
    batch = {"x": x, "z": jax.random.normal(state.key, (len(x), 8))}
    (dl, _), grads = sk.value_and_grad(lambda D, b, k: sk.mean(d_loss(D, G, b["x"], b["z"])))(D, batch, state.key)
    updates, d_state = opt["D"].update(grads, opt_state["D"], D)
    D = optax.apply_updates(D, updates)
    (gl, _), grads = sk.value_and_grad(lambda G, b, k: sk.mean(g_loss(G, D, b["z"])))(G, batch, state.key)
    updates, g_state = opt["G"].update(grads, opt_state["G"], G)
    params = {"G": optax.apply_updates(G, updates), "D": D}
    return state.replace(params=params, opt_state={"G": g_state, "D": d_state}), {"loss": dl + gl}


task = sk.Task(init, train_step=train_step, optimizer=both, train_data=DATA, rules=[(".*/w1", [None, "mlp"])])


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(trained):
    assert int(trained.state.step) == STEPS  # the step does not count them itself
