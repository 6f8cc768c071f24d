"""Steps of one's own: gradients of each example, points and rollouts that the step makes itself."""

import functools

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import (
    STEPS,
    NaturalTask,
    batches,
    columns,
    mlp,
    mlp_init,
    natural,
    normal,
    run_plain,
    step_key,
    updated,
    weights,
)
from tests.tasks import classifier


@natural
def dp_sgd():
    """DP-SGD: each example's gradient is clipped, the gradients are summed, and noise is added."""

    def clipped(grads):
        """Of all examples, each scaled to a norm of at most 0.5, their mean."""
        norms = jnp.sqrt(sum((g**2).sum(tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1, 0.5 / norms)
        return jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / len(scale), grads)

    def noisy(grads, key):
        leaves, tree = jax.tree.flatten(grads)
        drawn = [jax.random.normal(k, g.shape) for g, k in zip(leaves, jax.random.split(key, len(leaves)), strict=True)]
        return jax.tree.unflatten(tree, [g + 0.01 * n for g, n in zip(leaves, drawn, strict=True)])

    by_example = jax.vmap(jax.value_and_grad(classifier.losses_of), (None, 0))
    optimizer = optax.sgd(0.3)

    def plain_step(params, opt_state, batch, key):
        losses, grads = by_example(params, batch)
        return *updated(optimizer, noisy(clipped(grads), key), params, opt_state), losses.mean()

    def plain():
        params = classifier.init(jax.random.key(0))
        inputs = [(batch, step_key(step)) for step, batch in enumerate(batches(classifier.DATA))]
        return run_plain(plain_step, (params, optimizer.init(params)), inputs)

    def train_step(state, batch):
        losses, grads = by_example(state.params, batch)
        return state.apply_gradients(noisy(clipped(grads), state.key)), {"loss": losses.mean()}

    data, rules = classifier.DATA, columns("up")
    task = sk.Task(classifier.init, train_step=train_step, optimizer=optimizer, train_data=data, rules=rules)
    return NaturalTask(task, plain)


@natural
def pinn():
    """A physics-informed network: no data, new collocation points in each step, sharded over the replicas."""

    def u(params, t, x):
        return mlp(params, jnp.array([t, x, 1.0]))[0]

    def residual(params, point):
        """Of the heat equation, with u(0, x) = sin(pi x)."""
        t, x = point
        u_t = jax.grad(u, 1)(params, t, x)
        u_xx = jax.grad(jax.grad(u, 2), 2)(params, t, x)
        return (u_t - 0.1 * u_xx) ** 2 + (u(params, 0.0, x) - jnp.sin(jnp.pi * x)) ** 2

    loss_of = lambda params, points: jax.vmap(residual, (None, 0))(params, points).mean()
    init, optimizer = mlp_init(3, 32, 1), optax.sgd(0.05)
    points_of = lambda key: jax.random.uniform(key, (64, 2))

    def plain_step(params, opt_state, key):
        loss, grads = jax.value_and_grad(loss_of)(params, points_of(key))
        return *updated(optimizer, grads, params, opt_state), loss

    def plain():
        params = init(jax.random.key(0))
        return run_plain(plain_step, (params, optimizer.init(params)), [(step_key(i),) for i in range(STEPS)])

    def train_step(state, batch, shared=lambda x: sk.shard(x, "rows", None)):
        loss, grads = jax.value_and_grad(loss_of)(state.params, shared(points_of(state.key)))
        return state.apply_gradients(grads), {"loss": loss}

    task = sk.Task(init, train_step=train_step, optimizer=optimizer, rules=columns("up"))
    lines = ('return jax.numpy.tanh(x @ params["up"]) @ params["down"]',)
    return NaturalTask(task, plain, repeating=(functools.partial(train_step, shared=lambda x: x), lines))


@natural
def ppo():
    """PPO: rollouts of an environment in the model state, and four updates per step."""
    start = normal(16, 2)

    init_params = functools.partial(weights, up=(2, 16), down=(16, 2), v=(16, 1))

    def policy(params, s):
        return jax.nn.log_softmax(mlp(params, s)), (jnp.tanh(s @ params["up"]) @ params["v"])[..., 0]

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

        last, path = jax.lax.scan(step, s, jax.random.split(key, 8))
        returns = jax.lax.scan(lambda g, r: (r + 0.9 * g,) * 2, policy(params, last)[1], path["r"], reverse=True)[1]
        return last, path | {"returns": returns, "advantage": returns - path["v"]}

    def ppo_loss(params, path):
        logp, v = policy(params, path["s"])
        ratio = jnp.exp(jnp.take_along_axis(logp, path["a"][..., None], -1)[..., 0] - path["logp"])
        clipped = jnp.minimum(ratio * path["advantage"], jnp.clip(ratio, 0.8, 1.2) * path["advantage"])
        return (-clipped + 0.5 * (v - path["returns"]) ** 2).mean()

    # Few steps, no Adam: reinforcement learning is chaotic, and two right programs part later.
    optimizer = optax.sgd(0.05)

    def plain_step(params, opt_state, s, key):
        s, path = rollout(params, s, key)
        for _ in range(4):
            loss, grads = jax.value_and_grad(ppo_loss)(params, path)
            params, opt_state = updated(optimizer, grads, params, opt_state)
        return params, opt_state, s, loss

    def plain():
        params = init_params(jax.random.key(0))
        state = (params, optimizer.init(params), start)
        return run_plain(plain_step, state, [(step_key(i),) for i in range(STEPS)])[:3]

    def train_step(state, batch, shared=lambda x: sk.shard(x, "rows", None)):
        s, path = rollout(state.params, shared(state.model_state), state.key)
        for _ in range(4):
            loss, grads = jax.value_and_grad(ppo_loss)(state.params, path)
            state = state.apply_gradients(grads, s)
        return state, {"loss": loss}

    def check(trained):
        assert int(trained.state.step) == STEPS  # and not four times as many

    init = lambda key: sk.Variables(init_params(key), jnp.asarray(start))
    task = sk.Task(init, train_step=train_step, optimizer=optimizer, rules=columns("up"))
    lines = ('return jax.numpy.tanh(x @ params["up"]) @ params["down"]', "return jax.nn.log_softmax(mlp(params, s))")
    return NaturalTask(task, plain, check=check, repeating=(functools.partial(train_step, shared=lambda x: x), lines))
