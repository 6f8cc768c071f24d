"""PPO on CartPole, with the environment in JAX: a whole update is one compiled step.

    spmdkit train configs/ppo_cartpole.yaml

The environments are the model state, sharded over the replicas by `sk.shard`. Each step plays `steps` moves in all of
them, computes advantages (GAE), and updates the policy and the value `epochs` times. No batch is read.

Expected: a mean return of up to 500.0 of finished episodes; a random policy has 22, the limit is 500.
0.3 minutes on two CPU cores.

Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), and "High-Dimensional Continuous Control
Using Generalized Advantage Estimation" (2016); Barto, Sutton and Anderson, "Neuronlike Adaptive Elements" (1983), with
the constants of Gymnasium's CartPole-v1.

Shape suffixes: N environments, T moves, S the 4 numbers of a state.
"""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
LIMIT = 500
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2


def push(s_NS, action_N):
    """Returns the states after a push to the left (0) or to the right (1)."""
    _, dx, angle, spin = jnp.moveaxis(s_NS, -1, 0)
    force, mass = jnp.where(action_N == 1, FORCE, -FORCE), CART + POLE
    swing = (force + POLE * HALF_LENGTH * spin**2 * jnp.sin(angle)) / mass
    turn = (GRAVITY * jnp.sin(angle) - jnp.cos(angle) * swing) / (
        HALF_LENGTH * (4.0 / 3.0 - POLE * jnp.cos(angle) ** 2 / mass)
    )
    speed_up = swing - POLE * HALF_LENGTH * turn * jnp.cos(angle) / mass
    rates = jnp.stack([dx, speed_up, spin, turn], -1)
    return s_NS + SECONDS * rates


def start(key, num):
    return jax.random.uniform(key, (num, 4), minval=-0.05, maxval=0.05)


def init_params(key, width):
    def head(key, num_results):
        first, second = jax.random.split(key)
        up, middle = (jax.random.normal(k, (n, width)) / n**0.5 for k, n in ((first, 4), (second, width)))
        return {"up": up, "middle": middle, "down": jnp.zeros((width, num_results))}

    policy, value = jax.random.split(key)
    return {"policy": head(policy, 2), "value": head(value, 1)}


def apply(w, s_NS):
    return jnp.tanh(jnp.tanh(s_NS @ w["up"]) @ w["middle"]) @ w["down"]


def play(params, envs, key, num_moves):
    """Returns the environments after `num_moves` moves, and the states, actions and rewards, [T, N]."""

    def move(envs, key):
        action_key, start_key = jax.random.split(key)
        s_NS, returns_N = envs["state"], envs["return"] + 1
        scores = jax.nn.log_softmax(apply(params["policy"], s_NS))
        action_N = jax.random.categorical(action_key, scores)
        new_NS = push(s_NS, action_N)
        done_N = (jnp.abs(new_NS[:, 0]) > 2.4) | (jnp.abs(new_NS[:, 2]) > 0.2095) | (returns_N >= LIMIT)
        new = {
            "state": jnp.where(done_N[:, None], start(start_key, len(s_NS)), new_NS),
            "return": jnp.where(done_N, 0.0, returns_N),
            "last_return": jnp.where(done_N, returns_N, envs["last_return"]),
        }
        log_p_N = jnp.take_along_axis(scores, action_N[:, None], 1)[:, 0]
        return new, {"s": s_NS, "action": action_N, "log_p": log_p_N, "done": done_N}

    return jax.lax.scan(move, envs, jax.random.split(key, num_moves))


def advantages(value_TN, last_N, done_TN):
    """Returns the advantage of each move. Each move has a reward of 1."""
    following_TN = jnp.concatenate([value_TN[1:], last_N[None]])
    delta_TN = 1.0 + jnp.where(done_TN, 0.0, DISCOUNT * following_TN) - value_TN

    def back(advantage_N, at):
        delta_N, done_N = at
        advantage_N = delta_N + jnp.where(done_N, 0.0, DISCOUNT * TRACE * advantage_N)
        return advantage_N, advantage_N

    return jax.lax.scan(back, jnp.zeros_like(last_N), (delta_TN, done_TN), reverse=True)[1]


def ppo_loss(params, path):
    scores = jax.nn.log_softmax(apply(params["policy"], path["s"]))
    log_p = jnp.take_along_axis(scores, path["action"][..., None], -1)[..., 0]
    ratio = jnp.exp(log_p - path["log_p"])
    gain = jnp.minimum(ratio * path["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * path["advantage"])
    entropy = -(jnp.exp(scores) * scores).sum(-1)
    error = (apply(params["value"], path["s"])[..., 0] - path["target"]) ** 2
    return (-gain + 0.5 * error / 100.0 - 0.01 * entropy).mean()


@sk.task
def task(envs=64, moves=64, epochs=8, width=64):
    """Returns the task; the arguments are the config's `task_args`."""

    def init(key):
        zeros = jnp.zeros(envs)
        state = {"state": start(key, envs), "return": zeros, "last_return": zeros}
        return sk.Variables(init_params(key, width), state)

    def train_step(state, batch):
        before = {name: sk.shard(x, "rows", *[None] * (x.ndim - 1)) for name, x in state.model_state.items()}
        after, path = play(state.params, before, state.key, moves)
        value_TN = apply(state.params["value"], path["s"])[..., 0]
        advantage_TN = advantages(value_TN, apply(state.params["value"], after["state"])[..., 0], path["done"])
        path["target"] = advantage_TN + value_TN
        path["advantage"] = (advantage_TN - advantage_TN.mean()) / (advantage_TN.std() + 1e-6)
        for _ in range(epochs):
            loss, grads = jax.value_and_grad(ppo_loss)(state.params, path)
            state = state.apply_gradients(grads, after)
        return state, {"loss": loss, "return": after["last_return"].mean()}

    return sk.Task(init, train_step=train_step, optimizer=optax.adam)
