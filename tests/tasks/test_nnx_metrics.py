"""Metrics of flax nnx in an evaluation: their states add, and nnx computes the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, train

# ---- shared ---------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 12)).astype(np.float32), "y": random.integers(0, 4, 64).astype(np.int32)}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 4)) / 4}


def logits_of(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def losses_of(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])


optimizer = optax.sgd(0.3)
TEST = jax.tree.map(lambda x: x[:61], DATA)


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for batch in batches(DATA):
        params, opt_state, loss = plain_step(params, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


def plain_metrics(params):
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    for batch in batches(TEST):
        metrics.update(logits=logits_of(params, batch), labels=batch["y"], loss=losses_of(params, batch))
    return metrics.compute()


# ---- spmdkit --------------------------------------------------------------------------------------------------------


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

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    run = train(task, mesh)
    assert_same(run, plain())
    found = run.program.eval(jax.device_put(run.state, run.program.state_sharding))
    for name, value in plain_metrics(run.params).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
