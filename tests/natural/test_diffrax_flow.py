"""A continuous normalizing flow, as diffrax's own example writes it: an ODE whose field takes a vjp inside the
solver.

Source: diffrax, examples/continuous_normalising_flow (FFJORD, Grathwohl et al. 2019).
"""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.fixed_numbers import normal
from tests.support.natural_runs import BATCH, STEPS, assert_same_run, by_hand, keep_gradient, train

DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 2)).astype(np.float32)


def init(key):
    return {"in": normal(0, 2, 8) / 2, "out": normal(1, 8, 2) / 4}


def log_likelihood(params, y):
    """Returns log p(y): the flow is followed back in time with the trace of its Jacobian."""

    def field(t, z, args):
        f = lambda y: jnp.tanh(y * (1 + t) @ params["in"]) @ params["out"]
        value, pull = jax.vjp(f, z[0])
        (rows,) = jax.vmap(pull)(jnp.eye(2))
        return value, jnp.trace(rows)

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field), diffrax.Heun(), t0=0.5, t1=0.0, dt0=-0.125, y0=(y, 0.0), max_steps=8
    )
    (z,), (change,) = solution.ys
    return -0.5 * (z**2).sum() - jnp.log(2 * jnp.pi) - change


def likelihoods(params, rows):
    return jax.vmap(lambda y: log_likelihood(params, y))(rows)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["one device", "data 8"])
def test_diffrax_flow_equals_one_device(mesh):
    loss_fn = lambda params, rows, key: sk.mean(-likelihoods(params, rows))
    _, run = train(sk.Task(init, loss_fn, keep_gradient(optax.adam(1e-2)), train_data=DATA), mesh)
    right = by_hand(
        lambda params, rows: (-likelihoods(params, rows).mean(), {}),
        jax.jit(init)(jax.random.key(0)),
        DATA,
        optax.adam(1e-2),
    )
    assert_same_run(run, right)
