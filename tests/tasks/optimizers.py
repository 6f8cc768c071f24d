"""Eighteen optimizers of optax as they are."""

import functools

import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA, init, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------

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


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain(optimizer):
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


def task(optimizer):
    return sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])


# ---- checks ----------------------------------------------------------------------------------------------------------

VARIANTS = {name: (task(o), functools.partial(plain, o)) for name, o in OPTIMIZERS.items()}
