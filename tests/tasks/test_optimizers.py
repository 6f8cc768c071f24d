"""Eighteen optimizers of optax as they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, train

# ---- shared ---------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 12)).astype(np.float32), "y": random.integers(0, 4, 64).astype(np.int32)}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 4)) / 4}


def losses_of(params, batch):
    logits = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "dog": optax.contrib.dog(1.0),
    "dowg": optax.contrib.dowg(1.0),
    "prodigy": optax.contrib.prodigy(),
    "dadapt": optax.contrib.dadapt_adamw(1.0),
    "acprop": optax.contrib.acprop(1e-2, eps_root=1e-8),  # it divides by the last gradient: one of nothing, by rounding
    "momo": optax.contrib.momo(1.0),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1, momentum=0.9)),
    "ademamix": optax.contrib.ademamix(1e-2),
    "flatten": optax.flatten(optax.adam(1e-2)),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.cosine_decay_schedule(1e-2, 4)),
}


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


def plain_step(optimizer, params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
    value = {"value": loss} if optimizer is OPTIMIZERS["momo"] else {}
    updates, opt_state = optimizer.update(grads, opt_state, params, **value)
    return optax.apply_updates(params, updates), opt_state, loss


def plain(optimizer):
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    step = jax.jit(functools.partial(plain_step, optimizer))
    for batch in batches(DATA):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit --------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


def task(optimizer):
    return sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])


# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
@pytest.mark.parametrize(
    "name",
    [name if name in ("muon", "MultiSteps") else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS],
)
def test_it_is_the_plain_script(name, mesh):
    assert_same(train(task(OPTIMIZERS[name]), mesh), plain(OPTIMIZERS[name]))


@pytest.mark.parametrize(
    "name", ["lion", *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS if n != "lion")]
)
def test_a_gradient_twice_as_large_is_another_program_whatever_the_optimizer_divides_by(name):
    """The loss of the same parameters is the same, and of some optimizers the parameters too: their state tells of
    it."""
    double = lambda params: jax.tree.map(lambda x: 2 * x - jax.lax.stop_gradient(x), params)
    wrong = sk.Task(init, lambda params, *more: loss_fn(double(params), *more), OPTIMIZERS[name], train_data=DATA)
    with pytest.raises(AssertionError, match=r"opt_state|Not equal to tolerance"):
        assert_same(train(wrong, "one device"), plain(OPTIMIZERS[name]))
