"""A CNN in flax linen: BatchNorm, dropout, a schedule, clipping and an average of the parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.natural_runs import leaf_errors
from tests.support.tasks import batches, example_keys

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    "image": random.normal(size=(64, 8, 8, 1)).astype(np.float32),
    "label": random.integers(0, 4, 64).astype(np.int32),
}
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 4)


class CNN(nn.Module):
    axes: tuple | None = None

    @nn.compact
    def __call__(self, x, keys=None):
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=keys is None, momentum=0.9, axis_name=self.axes)(x))
        x = nn.avg_pool(x, (4, 4), (4, 4)).reshape(len(x), -1)
        if keys is not None:  # one key an example: the same values are dropped on every mesh
            x = jax.vmap(lambda x, k: jnp.where(jax.random.bernoulli(k, 0.8, x.shape), x / 0.8, 0))(x, keys)
        return nn.Dense(4)(x)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------

model, optimizer = CNN(), optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(schedule))


@jax.jit
def plain_step(variables, ema, opt_state, batch, keys):
    def loss_fn(params):
        logits, new = model.apply(variables | {"params": params}, batch["image"], keys, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), new

    params = variables["params"]
    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)
    return {"params": params, **new}, ema, opt_state, loss


def plain():
    variables, losses = model.init(jax.random.key(0), DATA["image"][:1]), []
    ema, opt_state = variables["params"], optimizer.init(variables["params"])
    for step, batch in enumerate(batches(DATA)):
        variables, ema, opt_state, loss = plain_step(variables, ema, opt_state, batch, example_keys(step))
        losses.append(loss)
    return losses, variables["params"], opt_state[1], variables["batch_stats"], ema


# ---- spmdkit ---------------------------------------------------------------------------------------------------------

global_model = CNN(("replica", "data"))


def init(key):
    variables = CNN().init(key, DATA["image"][:1])
    return sk.Variables(variables["params"], {"batch_stats": variables["batch_stats"]})


def loss_fn(params, state, batch, key):
    variables = {"params": params, **state}
    logits, new = global_model.apply(variables, batch["image"], sk.example_keys(), mutable=["batch_stats"])
    return sk.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])), {}, new


task = sk.Task(init, loss_fn, optax.sgd(schedule), train_data=DATA, rules=[("Dense_0/kernel", ["embed", "mlp"])])
SETTINGS = {"ema": 0.9, "clip_norm": 0.5}


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(trained, statistics, ema):
    assert max(leaf_errors(trained.state.ema, jax.device_get(ema)).values()) < 1e-5
    assert max(leaf_errors(trained.state.model_state["batch_stats"], jax.device_get(statistics)).values()) < 1e-5
