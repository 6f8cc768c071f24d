"""Losses over all rows of the batch, and sums of several means."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import (
    NaturalTask,
    columns,
    example_keys,
    ids,
    mlp,
    mlp_init,
    natural,
    normal,
    train_plain,
    weights,
)
from tests.tasks.classifier import DATA, init

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def pair(init, loss_fn, loss_of, optimizer, data, rules="up", keyed=False):
    """Returns the task with `loss_fn`, and the script with `loss_of`."""
    task = sk.Task(init, loss_fn, optimizer, train_data=data, rules=columns(rules))
    return NaturalTask(task, lambda: train_plain(init, loss_of, optimizer, data, example_keys if keyed else None)[:3])


def unit(x):
    return x / jnp.linalg.norm(x + 1e-6, axis=-1, keepdims=True)


@natural
def clip():
    """CLIP: the negatives of an example are all other examples of the whole batch."""
    init = lambda key: weights(key, image=(12, 8), text=(6, 8)) | {"scale": jnp.log(10.0)}
    encode = lambda params, batch: [unit(jnp.tanh(batch[k] @ params[k])) for k in ("image", "text")]

    def loss_of(params, batch):
        a, b = encode(params, batch)
        logits, labels = jnp.exp(params["scale"]) * a @ b.T, jnp.arange(len(a))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)).mean() / 2

    def loss_fn(params, batch, key):
        a, b = encode(params, batch)
        (all_a, all_b), real = sk.all_gather((a, b), with_mask=True)
        scale, labels = jnp.exp(params["scale"]), sk.replica_index() * len(a) + jnp.arange(len(a))
        find = lambda x, others: jnp.where(real, scale * x @ others.T, -jnp.inf)
        return sk.mean(cross_entropy(find(a, all_b), labels) + cross_entropy(find(b, all_a), labels)) / 2

    data = {"image": normal(64, 12), "text": normal(64, 6)}
    return pair(init, loss_fn, loss_of, optax.adam(1e-2), data, "image|text")


@natural
def mixup():
    """Mixup with partners from the whole batch, and soft labels."""
    losses_of = lambda params, x, y: optax.softmax_cross_entropy(mlp(params, x), y)

    def mixed(x, other, keys):
        lam = jax.vmap(jax.random.uniform)(keys)[:, None]
        return lam * x + (1 - lam) * other

    def loss_of(params, batch, keys):
        x, y = batch["x"], jax.nn.one_hot(batch["y"], 4)
        return losses_of(params, mixed(x, x[::-1], keys), mixed(y, y[::-1], keys)).mean()

    def loss_fn(params, batch, key):
        x, y, keys = batch["x"], jax.nn.one_hot(batch["y"], 4), sk.example_keys()
        num, first = len(x), sk.replica_index() * len(x)
        others = sk.all_gather((x, y))  # the partner of a row is the one that stands as far from the end of the batch
        partner = lambda rows: jax.lax.dynamic_slice_in_dim(rows[::-1], first, num)
        return sk.mean(losses_of(params, mixed(x, partner(others[0]), keys), mixed(y, partner(others[1]), keys)))

    return pair(init, loss_fn, loss_of, optax.sgd(0.2), DATA, keyed=True)


@natural
def simclr():
    """SimCLR: each view is matched with its other view among all views of the batch, except itself."""

    def views(params, batch, keys):
        noise = jax.vmap(lambda k: jax.random.normal(k, (2, 12)))(keys)
        return [unit(mlp(params, batch["x"] + 0.1 * noise[:, i])) for i in (0, 1)]

    def loss_of(params, batch, keys):
        z = jnp.concatenate(views(params, batch, keys))
        similarity = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, 5 * z @ z.T)
        return cross_entropy(similarity, jnp.roll(jnp.arange(len(z)), len(z) // 2)).mean()

    def loss_fn(params, batch, key):
        a, b = views(params, batch, sk.example_keys())
        all_a, all_b = sk.all_gather((a, b))
        own = sk.replica_index() * len(a) + jnp.arange(len(a))
        itself = own[:, None] == jnp.arange(len(all_a))

        def find(x, others, same):
            similarity = [5 * x @ others.T, jnp.where(itself, -jnp.inf, 5 * x @ same.T)]
            return cross_entropy(jnp.concatenate(similarity, -1), own)

        return sk.mean((find(a, all_b, all_a) + find(b, all_a, all_b)) / 2)

    init = mlp_init(12, 16, 6)
    return pair(init, loss_fn, loss_of, optax.adam(1e-2), DATA, keyed=True)


@natural
def detection():
    """Detection: a box loss over the objects, a class loss over all positions, and a penalty."""
    there = normal(64, 5) < np.linspace(-1, 2, 64)[:, None]
    data = {"x": normal(64, 5, 8), "box": normal(64, 5, 4), "kind": ids(3, 64, 5) * there.astype(np.int32)}

    def terms(params, batch):
        h = jnp.tanh(batch["x"] @ params["up"])
        off = optax.huber_loss(h @ params["box"], batch["box"]).sum(-1)
        return off, cross_entropy(h @ params["kind"], batch["kind"]), batch["kind"] > 0

    penalty = lambda params: 1e-3 * optax.tree.norm(params, squared=True)

    def loss_of(params, batch):
        off, wrong, there = terms(params, batch)
        return 2.0 * (off * there).sum() / there.sum() + wrong.mean() + penalty(params)

    def loss_fn(params, batch, key):
        off, wrong, there = terms(params, batch)
        boxes, kinds = sk.mean(off, where=there), sk.mean(wrong)
        return 2.0 * boxes + kinds + penalty(params), {"boxes": boxes, "kinds": kinds}

    init = functools.partial(weights, up=(8, 16), box=(16, 4), kind=(16, 3))
    return pair(init, loss_fn, loss_of, optax.adam(1e-2), data)


@natural
def mlm_nsp():
    """BERT's pretraining: the mean over masked tokens plus the mean over sentences."""
    data = {
        "tokens": ids(11, 64, 6),
        "targets": ids(11, 64, 6)[::-1],
        "masked": normal(64, 6) < np.linspace(-1, 1, 64)[:, None],
        "is_next": ids(2, 64),
    }

    class Bert(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(11, 16)(tokens) + self.param("positions", nn.initializers.normal(0.02), (6, 16))
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=2)(x))
            x = nn.LayerNorm()(x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(x))))
            return nn.Dense(11)(x), nn.Dense(2)(jnp.tanh(nn.Dense(16)(x[:, 0])))

    def terms(params, batch):
        tokens, sentence = Bert().apply({"params": params}, batch["tokens"])
        return cross_entropy(tokens, batch["targets"]), cross_entropy(sentence, batch["is_next"])

    def loss_of(params, batch):
        mlm, nsp = terms(params, batch)
        return (mlm * batch["masked"]).sum() / batch["masked"].sum() + nsp.mean()

    def loss_fn(params, batch, key):
        mlm, nsp = terms(params, batch)
        mlm, nsp = sk.mean(mlm, where=batch["masked"]), sk.mean(nsp)
        return mlm + nsp, {"mlm": mlm, "nsp": nsp}

    init = lambda key: Bert().init(key, data["tokens"][:1])["params"]
    optimizer = optax.sgd(0.1, momentum=0.9)  # Adam makes signs of rounding noise: a key's bias has no gradient
    rules = [("up/kernel", ["embed", "mlp"]), ("down/kernel", ["mlp", "embed"])]
    return pair(init, loss_fn, loss_of, optimizer, data, rules)


@natural
def multi_task():
    """Two tasks in one batch, each on the rows with a label, weighted by learned noise parameters."""
    data = {"x": normal(64, 12), "value": normal(64), "kind": ids(3, 64)}
    data["has_kind"] = normal(64, seed=1) < np.linspace(-1, 1, 64)

    def init(key):
        return weights(key, up=(12, 16), value=(16, 1), kind=(16, 3)) | {"log_var": jnp.array([0.5, -0.5])}

    def total(params, batch, mean):
        h = jnp.tanh(batch["x"] @ params["up"])
        off = ((h @ params["value"])[:, 0] - batch["value"]) ** 2
        wrong = cross_entropy(h @ params["kind"], batch["kind"])
        a, b = jnp.exp(-params["log_var"])
        return a * mean(off) + b * mean(wrong, where=batch["has_kind"]) + params["log_var"].sum() / 2

    loss_fn = lambda params, batch, key: total(params, batch, sk.mean)
    return pair(init, loss_fn, lambda params, batch: total(params, batch, jnp.mean), optax.adam(1e-2), data)
