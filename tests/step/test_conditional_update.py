"""`conditional_update`: what choosing at the end gives, for every optimizer, and without the copies of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdkit.step.conditional_update import conditional_update

pytestmark = pytest.mark.promotes("optax")

OPTIMIZERS = {
    "adamw": optax.adamw(0.01),
    "clipped nesterov": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adafactor": optax.adafactor(0.01),
    "every second step": optax.MultiSteps(optax.adam(0.01), 2),
}
PARAMS = {"a": jnp.full((128, 128), 0.3), "b": jnp.linspace(-1, 1, 128)}


def steps(optimizer):
    """Returns the same step twice: with each leaf chosen early, and at the end."""

    def step(state, batch):
        params, kept, tied, _ = state
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(batch @ p["a"]) * p["b"]))(params)
        skip = ~jnp.isfinite(grads["a"]).all()
        updates, kept = optimizer.update(grads, kept, params)
        params = optax.apply_updates(params, updates)
        # Two leaves that are one array, one that is an input, one that is a number; metrics that read new and old.
        return (params, kept, (params["b"], params["b"]), tied[0]), {"norm": optax.tree.norm(grads)}, skip

    def at_the_end(state, batch):
        new, rest, skip = step(state, batch)
        return jax.tree.map(lambda a, b: jnp.where(skip, a, b), state, new), rest

    return lambda state, batch: conditional_update(step, state, state, batch), at_the_end


def start(optimizer):
    return PARAMS, optimizer.init(PARAMS), (jnp.zeros(128), jnp.ones(128)), jnp.zeros(128)


@pytest.mark.forms(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_conditional_update_equals_selecting_at_the_end(name):
    """Two programs, whose rounding may differ."""
    early, late = map(jax.jit, steps(OPTIMIZERS[name]))
    one = other = start(OPTIMIZERS[name])
    for number in range(6):
        batch = jnp.asarray(np.random.default_rng(number).normal(size=(8, 128)), jnp.float32)
        batch = batch.at[0, 0].set(jnp.nan) if number in (1, 4) else batch
        before = one
        (one, told), (other, also) = early(one, batch), late(other, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), (one, told), (other, also))
        if number in (1, 4):
            jax.tree.map(np.testing.assert_array_equal, one, before)


def test_adam_is_updated_in_place():
    state, batch = start(OPTIMIZERS["adamw"]), jnp.ones((8, 128))
    texts = [jax.jit(f, donate_argnums=0).lower(state, batch).compile().as_text() for f in steps(OPTIMIZERS["adamw"])]
    copies = [len(re.findall(r"= f32\[128,128\]\S* copy\(", text)) for text in texts]
    assert copies[0] <= 1 < copies[1], copies


def test_effects_keep_their_order(capfd):
    def step(x):
        jax.debug.callback(lambda v: print("first", v), x, ordered=True)
        y = x + 1
        jax.debug.callback(lambda v: print("second", v), y, ordered=True)
        return y, (), y > 3

    run = jax.jit(lambda x: conditional_update(step, x, x)[0])
    assert [float(run(jnp.float32(x))) for x in (0, 5)] == [1.0, 5.0]
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "0.0", "second", "1.0", "first", "5.0", "second", "6.0"]
