"""LoRA: a frozen base and adapters of low rank, frozen by `optax.multi_transform`."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    base = {"up": jax.random.normal(k1, (12, 32)) / 3, "down": jax.random.normal(k2, (32, 4)) / 5}
    lora = {"A": jax.random.normal(k3, (12, 2)), "B": jnp.zeros((2, 32))}
    return {"base": base, "lora": lora}


def losses_of(params, batch):
    base, lora = params["base"], params["lora"]
    h = jax.nn.relu(batch["x"] @ base["up"] + batch["x"] @ lora["A"] @ lora["B"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ base["down"], batch["y"])


kinds = {"base": "frozen", "lora": "trained"}
optimizer = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1, momentum=0.9)}, kinds)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("base/up|lora/B", [None, "mlp"])])
