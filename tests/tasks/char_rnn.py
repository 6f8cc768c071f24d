"""A recurrent language model over characters: an LSTM of flax under `nn.RNN`."""

import flax.linen as nn
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = random.integers(0, 10, (64, 7)).astype(np.int32)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.RNN(nn.OptimizedLSTMCell(16))(nn.Embed(10, 8)(tokens))
        return nn.Dense(10)(x)


model = Model()


def init(key):
    return model.init(key, DATA[:1, :-1])["params"]


def losses_of(params, tokens):
    logits = model.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("Dense_0/kernel", ["embed", "mlp"])])
