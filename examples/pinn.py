"""A physics-informed network for the heat equation, u_t = 0.1 u_xx on [0, 1] x [0, 1], with u(x, 0) = sin(pi x) and
u(0, t) = u(1, t) = 0.

It uses features that most language models do not need. It differentiates with respect to its *inputs* inside the loss.
It weights its residuals by a function of the parameters (causal weights with a learned rate). It draws from a separate
key and stores statistics, a count and a maximum in the model state. On every mesh the numbers are those of one device.

Expected: a mean error of 0.0046 against the exact solution, which lies between 0 and 1. 0.2 minutes on two CPU cores.

Source: Raissi, Perdikaris and Karniadakis, "Physics-informed neural networks" (2019); Wang, Sankaran and Perdikaris,
"Respecting causality" (2022), section 3, for weights that fall with time (here with a learned rate).

Shape suffixes: B points, F features, H hidden width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk

DIFFUSIVITY = 0.1
REPLICAS = ("replica", "data")
STATE_REDUCTION = {"points": "sum", "largest": "max"}


def exact(x, t):
    """Returns the solution."""
    return np.exp(-DIFFUSIVITY * np.pi**2 * t) * np.sin(np.pi * x)


def points(num, seed):
    """Returns points of the domain, and whether each is on a boundary, where the solution is known."""
    random = np.random.default_rng(seed)
    x, t = random.uniform(size=(2, num)).astype(np.float32)
    on_edge = np.arange(num) % 4 == 0
    which = random.integers(0, 3, num)
    x = np.where(on_edge & (which == 1), 0, np.where(on_edge & (which == 2), 1, x))
    t = np.where(on_edge & (which == 0), 0, t)
    return {
        "x": x.astype(np.float32),
        "t": t.astype(np.float32),
        "u": exact(x, t).astype(np.float32),
        "on_edge": on_edge,
    }


def init(key, width):
    keys = jax.random.split(key, 3)
    layer = lambda k, n, m: {"w": jax.random.normal(k, (n, m)) / np.sqrt(n), "b": jnp.zeros(m)}
    layers = [layer(keys[0], 2, width), layer(keys[1], width, width), layer(keys[2], width, 1)]
    mean_F = jnp.full(2, 0.5, "float32")
    state = {"mean": mean_F, "key": jax.random.key(1), "points": jnp.int32(0), "largest": jnp.zeros(())}
    return sk.Variables({"layers": layers, "rate": jnp.zeros(())}, state)


def solution(layers, mean_F, x, t):
    """Returns u at one point."""
    h_H = jnp.stack([x, t]) - mean_F
    for layer in layers[:-1]:
        h_H = jnp.tanh(h_H @ layer["w"] + layer["b"])
    return (h_H @ layers[-1]["w"] + layers[-1]["b"])[0]


def residual(layers, mean_F, x, t):
    """Returns u_t - 0.1 u_xx at one point, both as derivatives at a shift of zero."""
    at = lambda dx, dt: solution(layers, mean_F, x + dx, t + dt)
    return jax.grad(at, 1)(0.0, 0.0) - DIFFUSIVITY * jax.grad(jax.grad(at))(0.0, 0.0)


def loss_fn(params, state, batch, key):
    jitter_key, next_key = jax.random.split(state["key"])
    # The same shift for all points: the residual is evaluated at other points in each step.
    dx, dt = 0.01 * jax.random.uniform(jitter_key, (2,), minval=-1, maxval=1)
    inputs_BF = jnp.stack([batch["x"], batch["t"]], -1)
    mean_F = 0.9 * state["mean"] + 0.1 * lax.pmean(inputs_BF.mean(0), REPLICAS)
    over = lambda fn, x_B, t_B: jax.vmap(lambda x, t: fn(params["layers"], mean_F, x, t))(x_B, t_B)
    inside_B = over(residual, batch["x"] + dx, batch["t"] + dt) ** 2
    edge_B = (over(solution, batch["x"], batch["t"]) - batch["u"]) ** 2
    weights_B = jnp.where(batch["on_edge"], 4.0, jnp.exp(-jax.nn.softplus(params["rate"]) * batch["t"]))
    loss = sk.mean(jnp.where(batch["on_edge"], edge_B, inside_B), weights=weights_B) + 1e-3 * params["rate"] ** 2
    new = {
        "mean": mean_F,
        "key": next_key,
        "points": state["points"] + batch["x"].shape[0],
        "largest": jnp.maximum(0.99 * state["largest"], inside_B.max()),
    }
    return loss, {"residual": sk.mean(inside_B, where=~batch["on_edge"])}, new


def eval_fn(params, state, batch):
    u_B = jax.vmap(lambda x, t: solution(params["layers"], state["mean"], x, t))(batch["x"], batch["t"])
    return {"error": sk.mean(jnp.abs(u_B - batch["u"]))}


@sk.task
def task(width=32, num_points=4096):
    return sk.Task(
        init=lambda key: init(key, width),
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        optimizer=optax.adam,
        train_data=points(num_points, 0),
        eval_data=points(1024, 1),
        rules=[("layers/[01]/w", ["embed", "mlp"]), ("layers/[01]/b", ["mlp"]), ("layers/2/w", ["mlp", None])],
        state_reduction=STATE_REDUCTION,
    )
