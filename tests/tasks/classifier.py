"""The small classifier that many tasks train: data, model and loss."""

import optax

from tests.support.tasks import ids, mlp, mlp_init, normal

DATA = {"x": normal(64, 12), "y": ids(4, 64)}
init = mlp_init(12, 16, 4)


def logits_of(params, batch):
    return mlp(params, batch["x"])


def losses_of(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])
