"""The classifier with every kind of optimizer."""

import jax
import optax

from tests.support.tasks import mean_task, natural
from tests.tasks.classifier import DATA, init, losses_of

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


def classifier_with(optimizer):
    return mean_task(init, losses_of, optimizer, DATA)


def optimizers(name):
    """Eighteen optimizers of optax, unchanged."""
    return classifier_with(OPTIMIZERS[name])


optimizers = natural(optimizers, *OPTIMIZERS)


@natural
def line_search():
    """L-BFGS with a line search, which needs the loss as a function of the parameters."""
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)
    return classifier_with(optax.lbfgs(memory_size=3, linesearch=search))


@natural
def noisy_sgd():
    """An optimizer that draws noise: its state holds a random key."""
    return classifier_with(optax.noisy_sgd(0.1, eta=0.01, key=jax.random.key(7)))


@natural
def plateau():
    """An optimizer that lowers its learning rate on a plateau of the loss."""
    on_plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5, accumulation_size=1)
    return classifier_with(optax.chain(optax.sgd(0.5), on_plateau))
