"""PPO: rollouts of an environment in the model state, and four updates a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import STEPS, step_key

# ---- shared ----------------------------------------------------------------------------------------------------------

ENVS, HORIZON = 16, 8


def init_params(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (2, 16)) / 2, "pi": jnp.zeros((16, 2)), "v": jax.random.normal(k2, (16,)) / 8}


def policy(params, s):
    h = jnp.tanh(s @ params["w1"])
    return jax.nn.log_softmax(h @ params["pi"]), h @ params["v"]


def env_step(s, a):
    """A point that is pushed left or right; the reward is highest at the origin."""
    velocity = s[:, 1] + 0.1 * (2 * a - 1) - 0.05 * s[:, 0]
    s = jnp.stack([s[:, 0] + 0.1 * velocity, velocity], -1)
    return s, -(s[:, 0] ** 2)


def rollout(params, s, key):
    def step(s, key):
        logp, v = policy(params, s)
        draws = jax.vmap(lambda i: jax.random.gumbel(jax.random.fold_in(key, i), (2,)))(jnp.arange(len(s)))
        a = jnp.argmax(jax.lax.stop_gradient(logp) + draws, -1)
        new, r = env_step(s, a)
        return new, {"s": s, "a": a, "r": r, "v": v, "logp": jnp.take_along_axis(logp, a[:, None], -1)[:, 0]}

    last, path = jax.lax.scan(step, s, jax.random.split(key, HORIZON))
    returns = jax.lax.scan(lambda g, r: (r + 0.9 * g,) * 2, policy(params, last)[1], path["r"], reverse=True)[1]
    return last, path | {"returns": returns, "advantage": returns - path["v"]}


def ppo_loss(params, path):
    logp, v = policy(params, path["s"])
    ratio = jnp.exp(jnp.take_along_axis(logp, path["a"][..., None], -1)[..., 0] - path["logp"])
    clipped = jnp.minimum(ratio * path["advantage"], jnp.clip(ratio, 0.8, 1.2) * path["advantage"])
    return (-clipped + 0.5 * (v - path["returns"]) ** 2).mean()


START = np.random.default_rng(0).normal(size=(ENVS, 2)).astype(np.float32)
optimizer = optax.sgd(0.05)  # few steps, no Adam: reinforcement learning is chaotic, and two right programs part later


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, s, key):
    s, path = rollout(params, s, key)
    for _ in range(4):
        loss, grads = jax.value_and_grad(ppo_loss)(params, path)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state, s, loss


def plain():
    params, s, losses = init_params(jax.random.key(0)), START, []
    opt_state = optimizer.init(params)
    for step in range(STEPS):
        params, opt_state, s, loss = plain_step(params, opt_state, s, step_key(step))
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def init(key):
    return sk.Variables(init_params(key), jnp.asarray(START))


def train_step(state, batch):
    s, path = rollout(state.params, sk.shard(state.model_state, "rows", None), state.key)
    for _ in range(4):
        loss, grads = jax.value_and_grad(ppo_loss)(state.params, path)
        state = state.apply_gradients(grads, s)
    return state, {"loss": loss}


steps = np.zeros(1024, np.int32)  # a task has data: here only how many steps there are
task = sk.Task(init, train_step=train_step, optimizer=optimizer, train_data=steps, rules=[("w1", [None, "mlp"])])


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(trained):
    assert int(trained.state.step) == STEPS  # and not four times as many


def repeating(state, batch):
    """The same without `sk.shard`: every replica plays all games."""
    s, path = rollout(state.params, state.model_state, state.key)
    loss, grads = jax.value_and_grad(ppo_loss)(state.params, path)
    return state.apply_gradients(grads, s), {"loss": loss}


REPEATED_LINES = ('h = jnp.tanh(s @ params["w1"])', 'return jax.nn.log_softmax(h @ params["pi"]), h @ params["v"]')
