"""BERT's pretraining: the mean over masked tokens plus the mean over sentences."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    "tokens": random.integers(0, 11, (64, 6)).astype(np.int32),
    "targets": random.integers(0, 11, (64, 6)).astype(np.int32),
    "masked": random.uniform(size=(64, 6)) < np.linspace(0.1, 0.9, 64)[:, None],
    "is_next": random.integers(0, 2, 64).astype(np.int32),
}


class Bert(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 16)(tokens) + self.param("positions", nn.initializers.normal(0.02), (6, 16))
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=2)(x))
        x = nn.LayerNorm()(x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(x))))
        return nn.Dense(11)(x), nn.Dense(2)(jnp.tanh(nn.Dense(16)(x[:, 0])))


model, cross_entropy = Bert(), optax.softmax_cross_entropy_with_integer_labels
optimizer = optax.sgd(0.1, momentum=0.9)  # Adam makes signs of rounding noise: a key's bias has no gradient


def init(key):
    return model.init(key, DATA["tokens"][:1])["params"]


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def loss_of(params, batch):
    tokens, sentence = model.apply({"params": params}, batch["tokens"])
    mlm = cross_entropy(tokens, batch["targets"])
    mlm = (mlm * batch["masked"]).sum() / batch["masked"].sum()
    return mlm + cross_entropy(sentence, batch["is_next"]).mean()


def plain():
    return train_plain(init, loss_of, optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    tokens, sentence = model.apply({"params": params}, batch["tokens"])
    mlm = sk.mean(cross_entropy(tokens, batch["targets"]), where=batch["masked"])
    nsp = sk.mean(cross_entropy(sentence, batch["is_next"]))
    return mlm + nsp, {"mlm": mlm, "nsp": nsp}


task = sk.Task(
    init,
    loss_fn,
    optimizer,
    train_data=DATA,
    rules=[("up/kernel", ["embed", "mlp"]), ("down/kernel", ["mlp", "embed"])],
)
