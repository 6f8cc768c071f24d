"""Metrics of flax nnx in an evaluation: their states add, and nnx computes the rest."""

import jax
import optax
from flax import nnx

import spmdkit as sk
from tests.support.tasks import batches, check_evaluation, train_plain
from tests.tasks.classifier import DATA, init, logits_of, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------

optimizer = optax.sgd(0.3)
TEST = jax.tree.map(lambda x: x[:61], DATA)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain_metrics(params):
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    for batch in batches(TEST):
        metrics.update(logits=logits_of(params, batch), labels=batch["y"], loss=losses_of(params, batch))
    return metrics.compute()


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


def eval_fn(params, batch):
    real, metrics = sk.example_mask(), {"accuracy": nnx.metrics.Accuracy(), "loss": nnx.metrics.Average("loss")}
    metrics["accuracy"].update(logits=logits_of(params, batch), labels=batch["y"], mask=real)
    metrics["loss"].update(loss=losses_of(params, batch), mask=real)
    split = {name: nnx.split(metric) for name, metric in metrics.items()}
    return {name: sk.derived(lambda s, d=d: nnx.merge(d, s).compute(), s) for name, (d, s) in split.items()}


task = sk.Task(
    init, loss_fn, optimizer, train_data=DATA, eval_data=TEST, eval_fn=eval_fn, rules=[("up", [None, "mlp"])]
)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(trained):
    check_evaluation(trained, plain_metrics(trained.params))
