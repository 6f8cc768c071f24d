"""A CNN in flax nnx with dropout: its random state travels as typed keys."""

import jax
import numpy as np
import optax
from flax import nnx

import spmdkit as sk
from tests.support.tasks import batches, train

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    "image": random.normal(size=(64, 8, 8, 1)).astype(np.float32),
    "label": random.integers(0, 4, 64).astype(np.int32),
}


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)  # plain draws differ by replica; at rate 0 the keys alone travel
        self.dense = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv(x)), (4, 4), (4, 4)).reshape(len(x), -1)
        return self.dense(self.dropout(x))


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@nnx.jit
def plain_step(model, optimizer, batch):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def plain():
    model = CNN(nnx.Rngs(jax.random.key(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    losses = [plain_step(model, optimizer, batch) for batch in batches(DATA)]
    return losses, nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer.opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------

graphdef = nnx.split(nnx.eval_shape(lambda: CNN(nnx.Rngs(0))), nnx.Param, ...)[0]


def init(key):
    _, params, rest = nnx.split(CNN(nnx.Rngs(key)), nnx.Param, ...)
    return sk.Variables(params, rest)


def loss_fn(params, rest, batch, key):
    model = nnx.merge(graphdef, params, rest, copy=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return sk.mean(losses), {}, nnx.split(model, nnx.Param, ...)[2]


task = sk.Task(
    init, loss_fn, optax.sgd(0.1, momentum=0.9), train_data=DATA, rules=[("dense/kernel.*", ["embed", "mlp"])]
)


# ---- checks ----------------------------------------------------------------------------------------------------------


def run(mesh):
    trained = train(task, mesh)
    return trained._replace(params=nnx.to_pure_dict(trained.params))
