"""A script as in the tutorials of equinox and optax: a model as a pytree, `make_step`, a generator of batches."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

STEPS, BATCH = 30, 16


def get_data(num, key):
    t = jnp.linspace(0, 2 * jnp.pi, 8) + jax.random.uniform(key, (num, 1)) * 6
    return jnp.stack([jnp.sin(t), jnp.cos(t)], -1), (jnp.arange(num) % 2).astype(jnp.float32)


def dataloader(arrays, batch_size, rng):
    while True:
        order = rng.permutation(len(arrays[0]))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield tuple(array[order[start : start + batch_size]] for array in arrays)


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key)
        self.cell, self.linear = eqx.nn.GRUCell(2, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1])

    def __call__(self, x):
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), x)
        return self.linear(hidden)[0]


OPTIMIZER = optax.adam(3e-3)


@eqx.filter_jit
def make_step(model, x, y, opt_state):
    loss_fn = lambda model: optax.sigmoid_binary_cross_entropy(jax.vmap(model)(x), y).mean()
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


def main():
    model = RNN(key=jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    batches = dataloader(get_data(64, jax.random.key(1)), BATCH, np.random.default_rng(0))
    run = sk.start_run(make_step, (model, opt_state), steps=STEPS, run_dir="runs/rnn", checkpoint={"every_steps": 5})
    model, opt_state = run.state
    for number, (x, y) in run.batches(zip(range(STEPS), batches)):  # noqa: B905 - the generator has no end
        loss, model, opt_state = run.step(model, x, y, opt_state)
        if number % 10 == 0:
            print(f"step {number}: loss {loss:.4f}")
    run.close()
    return model, opt_state


if __name__ == "__main__":
    main()
