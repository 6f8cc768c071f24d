"""MoCo: a queue of the embeddings of earlier batches as negatives, in the model state, the same on every replica."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import batches
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def net(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 6)) / 4}


def embed(params, x):
    z = jax.nn.relu(x @ params["up"]) @ params["down"]
    return z / jnp.linalg.norm(z + 1e-6, axis=-1, keepdims=True)


def losses_of(params, queue, batch):
    """Returns (losses, embeddings of the other view)."""
    q, k = embed(params, batch["x"]), jax.lax.stop_gradient(embed(params, batch["x"][:, ::-1]))
    logits = 5 * jnp.concatenate([(q * k).sum(-1, keepdims=True), q @ queue.T], -1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros(len(q), jnp.int32)), k


QUEUE = jnp.zeros((40, 6))
optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, queue, opt_state, batch):
    def loss_of(params):
        losses, k = losses_of(params, queue, batch)
        return losses.mean(), k

    (loss, k), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), jnp.concatenate([k, queue])[:40], opt_state, loss


def plain():
    params, queue, losses = net(jax.random.key(0)), QUEUE, []
    opt_state = optimizer.init(params)
    for batch in batches(DATA):
        params, queue, opt_state, loss = plain_step(params, queue, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def init(key):
    return sk.Variables(net(key), QUEUE)


def loss_fn(params, queue, batch, key):
    losses, k = losses_of(params, queue, batch)
    return sk.mean(losses), {}, jnp.concatenate([sk.all_gather(k), queue])[:40]


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
