"""A small task that is correct on every mesh, and one task for each kind of user mistake."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import TaskRunner

REPLICAS = ("replica", "data")
BATCH = 32
NUM = 96


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM, 16)).astype(np.float32)
    y = np.tanh(x @ random.normal(size=(16, 8)) / 4).astype(np.float32)
    return {"x": x, "y": y, "weight": random.uniform(0.2, 3, NUM).astype(np.float32)}


def init(key):
    random = np.random.default_rng(1)
    return {"b": jnp.full(8, 0.1), "w": jnp.asarray(random.normal(size=(16, 8)) / 4, jnp.float32)}


def examples_loss(params, batch, hidden=lambda h: h):
    """Returns the loss of each example, [B]."""
    return ((hidden(jnp.tanh(batch["x"] @ params["w"])) + params["b"] - batch["y"]) ** 2).sum(-1)


def right(params, batch, key):
    """A correct loss: dropout per example, statistics over the replicas, negatives from all replicas, weights, a
    metric."""

    def hidden(h):
        if key is not None:
            keys = sk.example_keys()
            h = jnp.where(jax.vmap(lambda k: jax.random.bernoulli(k, 0.8, (8,)))(keys), h, 0)
        mask = sk.example_mask()[:, None]
        count, total = lax.psum((mask.sum(), (h * mask).sum(0)), REPLICAS)
        return h - total / jnp.maximum(count, 1)

    own = jnp.tanh(batch["x"] @ params["w"])
    everybody, is_real = sk.all_gather(own, with_mask=True)
    loss = examples_loss(params, batch, hidden) + jax.nn.logsumexp(jnp.where(is_real, own @ everybody.T, -jnp.inf), -1)
    return sk.mean(loss, weights=batch["weight"]), {"worst": sk.mean(jnp.abs(loss))}


def natural_init(key):
    state = {
        "key": jax.random.key(3),
        "raw": jax.random.key_data(jax.random.key(4)),
        "rows": jnp.int32(0),
        "largest": jnp.zeros(()),
        "mean": jnp.zeros(8),
    }
    return sk.Variables(init(key) | {"confidence": jnp.linspace(-1.0, 1, 16)}, state)


NATURAL_AGREE = {"rows": "sum", "largest": "max"}


def natural(params, state, batch, key):
    """A typical user loss: a derivative at a constant, learned weights, a key and statistics in the state."""
    noise_key, next_key = jax.random.split(state["key"])
    mean = lax.pmean(jnp.tanh(batch["x"] @ params["w"]).mean(0), REPLICAS)
    noise = 0.1 * jax.random.normal(noise_key, (8,))
    shift = jax.vmap(lambda x: jax.grad(lambda t: jnp.tanh(x * (1 + t) @ params["w"]).sum())(0.0))(batch["x"])
    loss = examples_loss(params, batch, lambda h: h - mean + noise) + shift**2
    new = {
        "key": next_key,
        "raw": jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(state["raw"]), 1)),
        "rows": state["rows"] + batch["x"].shape[0],
        "largest": jnp.maximum(state["largest"], jnp.abs(batch["x"]).max()),
        "mean": 0.9 * state["mean"] + 0.1 * mean,
    }
    return sk.mean(loss, weights=jax.nn.sigmoid(batch["x"] @ params["confidence"])), {}, new


def counts_devices(params, batch, key):
    lax.psum(1, REPLICAS)  # for a log message
    return sk.mean(examples_loss(params, batch))


def two_means(params, batch, key):
    """A sum of two means with different counts, one of them learned: detection, MLM with NSP."""
    loss = examples_loss(params, batch)
    confidence = jax.nn.sigmoid(batch["x"] @ params["w"][:, 0])
    return sk.mean(loss, weights=confidence) + 0.5 * sk.mean(loss, where=batch["weight"] > 1.5)


def real_rows_counted(params, batch, key):
    """A mean, and a metric over the real rows, for which the task requests the mask."""
    loss = examples_loss(params, batch)
    return sk.mean(loss), {"real": sk.derived(jnp.sqrt, sk.example_mask().astype(jnp.float32).sum())}


# ---- mistakes of users


def mean_of_means(params, batch, key):
    return sk.mean((examples_loss(params, batch) * batch["weight"]).sum() / batch["weight"].sum())


def plain_key(params, batch, key):
    drop = lambda h: h if key is None else h * jax.random.bernoulli(key, 0.8, h.shape)
    return sk.mean(examples_loss(params, batch, drop))


def own_statistics(params, batch, key):
    return sk.mean(examples_loss(params, batch, lambda h: (h - h.mean(0)) / (h.std(0) + 1)))


def summed_twice(params, batch, key):
    return sk.mean(examples_loss(params, batch)) * lax.psum(1, REPLICAS)


def divided_twice(params, batch, key):
    return sk.mean(examples_loss(params, batch)) / lax.psum(1, REPLICAS)


def own_normalisation(params, batch, key):
    mask = sk.example_mask()
    return sk.mean(examples_loss(params, batch) * (mask.size / jnp.maximum(mask.sum(), 1)))


def counts_padding(params, batch, key):
    return sk.mean(examples_loss(params, batch, lambda h: h - lax.pmean(h.mean(0), REPLICAS)))


def rows_of_the_next_replica(params, batch, key):
    num = lax.axis_size("data")
    shifted = lambda h: lax.ppermute(h, "data", [(i, (i + 1) % num) for i in range(num)])
    return sk.mean(examples_loss(params, batch, shifted))


def one_leaf(params, batch, key):
    own = lax.axis_index("data") * params["b"]
    return sk.mean(examples_loss({"w": params["w"], "b": params["b"] + own - lax.stop_gradient(own)}, batch))


def cut_off(params, batch, key):
    w = params["w"]
    if lax.axis_size("data") > 1:
        w = jnp.concatenate([w[:8], lax.stop_gradient(w[8:])])
    return sk.mean(examples_loss({"w": w, "b": params["b"]}, batch))


def metric_of_a_replica(params, batch, key):
    loss = examples_loss(params, batch)
    return sk.mean(loss), {"largest": sk.mean(loss.max())}


def state_of_a_replica(params, state, batch, key):
    loss = examples_loss(params, batch)
    return sk.mean(loss), {}, {"variance": jnp.var(batch["x"])}


def stateful_init(key):
    return sk.Variables(init(key), {"variance": jnp.zeros(())})


# ---- a task with ops

VOCAB, WIDTH, LENGTH = 16, 8, 8


def language_init(key):
    random = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
    return {
        "embed": normal(VOCAB, WIDTH),
        "layers": normal(WIDTH, 4, WIDTH).swapaxes(0, 1),
        "head": normal(WIDTH, VOCAB),
    }


def language(params, batch, key):
    rows = sk.context_order({"tokens": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:]})
    run = sk.pipeline(lambda table, rows: sk.embed(rows["tokens"], table), language_layer, language_head)
    return run(params["embed"], params["layers"], params["head"], rows)


def language_layer(x, weight, rows):
    heads = (x @ weight).reshape(*x.shape[:2], 2, -1)
    return x + sk.attention(heads, heads, heads).reshape(x.shape)


def language_head(x, head, rows):
    return sk.mean(sk.cross_entropy(x, head, rows["targets"]), where=rows["targets"] > 2)


def language_task():
    tokens = np.random.default_rng(3).integers(0, VOCAB, size=(NUM, LENGTH + 1)).astype(np.int32)
    rules = [("embed", ["vocab", "embed"]), ("head", ["embed", "vocab"]), ("layers", ["layers", None, None])]
    return sk.Task(language_init, language, optax.adam(1e-2), train_data={"tokens": tokens}, rules=rules)


@functools.cache
def language_judge():
    """Returns the case_runner of a model with an embedding and a head sharded over the vocabulary."""
    return CaseRunner(TaskRunner(sk.Config(task="t.py:t"), language_task(), BATCH, steps=2))


@functools.cache
def natural_judge():
    """Returns the case_runner of `natural`."""
    return new_natural_runner()


def new_natural_runner():
    task = sk.Task(natural_init, natural, optax.adam(1e-2), train_data=data(), state_reduction=NATURAL_AGREE)
    return CaseRunner(TaskRunner(sk.Config(task="t.py:t"), task, BATCH, steps=2))


# ---- case runners


@functools.cache
def case_runner(loss_fn, drop_remainder=True, stateful=False, steps=2, **settings):
    """Returns the case_runner of a task in this process."""
    task = sk.Task(
        init=stateful_init if stateful else init,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-2),
        train_data=data(),
        eval_data={name: x[: 64 if drop_remainder else 41] for name, x in data().items()},
        rules=[("w", ["embed", "mlp"])],
    )
    config = sk.Config(task="t.py:t", data={"drop_remainder": drop_remainder}, **settings)
    return CaseRunner(TaskRunner(config, task, BATCH, steps))
