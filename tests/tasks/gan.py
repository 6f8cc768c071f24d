"""Two networks against each other."""

import functools

import jax
import optax

import spmdkit as sk
from tests.support.tasks import (
    STEPS,
    NaturalTask,
    batches,
    columns,
    mlp,
    natural,
    normal,
    run_plain,
    step_key,
    updated,
    weights,
)

DATA = 1 + 0.5 * normal(64, 8)
opt = {"G": optax.adam(1e-3, b1=0.5), "D": optax.adam(2e-3, b1=0.5)}
both = optax.GradientTransformation(lambda p: {k: opt[k].init(p[k]) for k in p}, None)


def init(key):
    g, d = jax.random.split(key)
    net = functools.partial(weights, up=(8, 16))
    return {"G": net(g, down=(16, 8)), "D": net(d, down=(16, 1))}


def d_loss(D, G, x, z):
    return jax.nn.softplus(-mlp(D, x))[:, 0] + jax.nn.softplus(mlp(D, mlp(G, z)))[:, 0]


def g_loss(G, D, z):
    return jax.nn.softplus(-mlp(D, mlp(G, z)))[:, 0]


def plain_step(params, opt_state, x, key):
    (G, D), z = (params["G"], params["D"]), jax.random.normal(key, (len(x), 8))
    dl, grads = jax.value_and_grad(lambda D: d_loss(D, G, x, z).mean())(D)
    D, d_state = updated(opt["D"], grads, D, opt_state["D"])
    gl, grads = jax.value_and_grad(lambda G: g_loss(G, D, z).mean())(G)
    G, g_state = updated(opt["G"], grads, G, opt_state["G"])
    return {"G": G, "D": D}, {"G": g_state, "D": d_state}, dl + gl


def plain():
    params = init(jax.random.key(0))
    inputs = [(x, step_key(step)) for step, x in enumerate(batches(DATA))]
    return run_plain(plain_step, (params, both.init(params)), inputs)


def train_step(state, x):
    (G, D), opt_state = (state.params["G"], state.params["D"]), state.opt_state
    batch = {"x": x, "z": jax.random.normal(state.key, (len(x), 8))}
    (dl, _), grads = sk.value_and_grad(lambda D, b, k: sk.mean(d_loss(D, G, b["x"], b["z"])))(D, batch, state.key)
    D, d_state = updated(opt["D"], grads, D, opt_state["D"])
    (gl, _), grads = sk.value_and_grad(lambda G, b, k: sk.mean(g_loss(G, D, b["z"])))(G, batch, state.key)
    G, g_state = updated(opt["G"], grads, G, opt_state["G"])
    return state.replace(params={"G": G, "D": D}, opt_state={"G": g_state, "D": d_state}), {"loss": dl + gl}


@natural
def gan():
    """A GAN: two adversarial networks, each with its own optimizer."""

    def check(trained):
        assert int(trained.state.step) == STEPS  # the step does not count them itself

    task = sk.Task(init, train_step=train_step, optimizer=both, train_data=DATA, rules=columns(".*/up"))
    return NaturalTask(task, plain, check=check)
