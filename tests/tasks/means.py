"""Losses that are one mean over examples or tokens."""

import functools
import tempfile
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import NaturalTask, ids, mean_task, mlp, mlp_init, natural, normal, train_plain, weights
from tests.tasks.classifier import DATA

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@natural
def char_rnn():
    """A character-level language model: an LSTM of flax under `nn.RNN`."""
    data = ids(10, 64, 7)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(10)(nn.RNN(nn.OptimizedLSTMCell(16))(nn.Embed(10, 8)(tokens)))

    def losses_of(params, tokens):
        return cross_entropy(Model().apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    init = lambda key: Model().init(key, data[:1, :-1])["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))
    return mean_task(init, losses_of, optimizer, data, [("Dense_0/kernel", ["embed", "mlp"])])


@natural
def diffusion():
    """A denoising diffusion model: a time and a noise sample per example."""

    def losses_of(params, batch, keys):
        def one(x, key):
            of_time, of_noise = jax.random.split(key)
            t, noise = jax.random.uniform(of_time), jax.random.normal(of_noise, x.shape)
            alpha = jnp.cos(t * jnp.pi / 2) ** 2
            noisy = jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise
            return ((mlp(params, jnp.append(noisy, t)) - noise) ** 2).mean()

        return jax.vmap(one)(batch["x"], keys)

    return mean_task(mlp_init(13, 32, 12), losses_of, optax.adam(1e-2), DATA, keyed=True)


@natural
def equinox_mlp():
    """An equinox module: its arrays are trained, its functions are not."""
    make = lambda key: eqx.nn.MLP(12, 4, 16, 1, activation=jax.nn.gelu, key=key)
    static = eqx.filter(make(jax.random.key(0)), eqx.is_array, inverse=True)

    def losses_of(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["x"]), batch["y"])

    init = lambda key: eqx.filter(make(key), eqx.is_array)
    return mean_task(init, losses_of, optax.adamw(1e-2), DATA, [("layers/0/weight", ["mlp", None])])


@natural
def flow():
    """A normalizing flow of affine couplings, by the change of variables."""

    def losses_of(params, batch):
        z, log_det = batch["x"], jnp.zeros(len(batch["x"]))
        for layer in params:
            a, b = jnp.split(z, 2, -1)
            h = jnp.tanh(a @ layer["up"])
            s = jnp.tanh(h @ layer["scale"])
            z = jnp.concatenate([b * jnp.exp(s) + h @ layer["shift"], a], -1)
            log_det = log_det + s.sum(-1)
        return 0.5 * (z**2).sum(-1) - log_det

    layer = lambda key: weights(key, up=(6, 16), shift=(16, 6)) | {"scale": jnp.zeros((16, 6))}
    init = lambda key: [layer(k) for k in jax.random.split(key, 4)]
    return mean_task(init, losses_of, optax.adam(1e-3), DATA, ".*/up")


@natural
def gpt():
    """A small GPT in raw JAX with biases on queries, keys and values, tensor parallel by four rules."""

    def init(key):
        a, b, c = jax.random.split(key, 3)
        block = weights(a, qkv=(16, 3, 2, 8), up=(16, 32), down=(32, 16)) | {"qkv_bias": jnp.zeros((3, 2, 8))}
        block["out"] = jax.random.normal(b, (2, 8, 16)) / 4
        return {"block": block, **weights(c, embed=(13, 16), head=(16, 13))}

    def losses_of(params, tokens):
        norm = lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        p, x = params["block"], params["embed"][tokens[:, :-1]]
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", norm(x), p["qkv"]) + p["qkv_bias"], 2, 0)
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / 8**0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        x = x + jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores), v, p["out"])
        x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        return cross_entropy(norm(x) @ params["head"], tokens[:, 1:])

    # Adam would make signs of the rounding noise that is the gradient of the keys' bias: softmax does not depend on it.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3, momentum=0.9))
    rules = [
        (".*/qkv", [None, None, "heads", None]),
        (".*/out", ["heads", None, None]),
        (".*/up", [None, "mlp"]),
        (".*/down", ["mlp", None]),
    ]
    return mean_task(init, losses_of, optimizer, ids(13, 64, 9), rules)


@natural
def gradient_penalty():
    """A critic with a penalty on its gradient at points between real and generated examples (WGAN-GP)."""
    critic = lambda params, x: mlp(params, x)[..., 0]

    def losses_of(params, batch, keys):
        t = jax.vmap(jax.random.uniform)(keys)[:, None]
        between = t * batch["real"] + (1 - t) * batch["made"]
        slope = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, between)
        penalty = (jnp.sqrt((slope**2).sum(-1) + 1e-8) - 1) ** 2
        return critic(params, batch["made"]) - critic(params, batch["real"]) + 10 * penalty

    data = {"real": normal(64, 8), "made": normal(64, 8, seed=1)}
    return mean_task(mlp_init(8, 32, 1), losses_of, optax.sgd(0.05), data, keyed=True)


@natural
def linear_recurrence():
    """A linear recurrence with complex eigenvalues (LRU): two real leaves, one complex number."""

    def init(key):
        eigenvalue = {"log_radius": jnp.log(jnp.linspace(0.05, 0.4, 8)), "angle": jnp.linspace(0.1, 3.0, 8)}
        a, b = jax.random.split(key)
        return {"eigenvalue": eigenvalue, "in": weights(a, re=(4, 8), im=(4, 8)), **weights(b, out=(16,))}

    def losses_of(params, batch):
        radius, angle = jnp.exp(-jnp.exp(params["eigenvalue"]["log_radius"])), params["eigenvalue"]["angle"]
        a = jax.lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))
        u = batch["x"] @ jax.lax.complex(params["in"]["re"], params["in"]["im"])
        combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
        _, h = jax.lax.associative_scan(combine, (jnp.broadcast_to(a, u.shape), u), axis=1)
        last = jnp.concatenate([h[:, -1].real, h[:, -1].imag], -1)
        return (last @ params["out"] - batch["y"]) ** 2

    return mean_task(init, losses_of, optax.adam(1e-2), {"x": normal(64, 9, 4), "y": normal(64)}, "in/.*")


@natural
def lora():
    """LoRA: a frozen base and adapters of low rank, frozen by `optax.multi_transform`."""

    def init(key):
        lora = {**weights(key, A=(12, 2)), "B": jnp.zeros((2, 32))}
        return {"base": weights(key, up=(12, 32), down=(32, 4)), "lora": lora}

    def losses_of(params, batch):
        base, lora = params["base"], params["lora"]
        h = jax.nn.relu(batch["x"] @ base["up"] + batch["x"] @ lora["A"] @ lora["B"])
        return cross_entropy(h @ base["down"], batch["y"])

    kinds = {"base": "frozen", "lora": "trained"}
    optimizer = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1, momentum=0.9)}, kinds)
    return mean_task(init, losses_of, optimizer, DATA, "base/up|lora/B")


@natural
def maml():
    """MAML: one task per example, an inner gradient step, and the derivative through it."""
    error = lambda params, x, y: ((mlp(params, x) - y) ** 2).mean()

    def losses_of(params, batch):
        def of_task(task):
            inner = jax.grad(error)(params, task["x"], task["y"])
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
            return error(adapted, task["x_test"], task["y_test"])

        return jax.vmap(of_task)(batch)

    data = {
        f"{k}{part}": normal(64, 5, n, seed=i) for k, n in (("x", 3), ("y", 1)) for i, part in enumerate(("", "_test"))
    }
    return mean_task(mlp_init(3, 16, 1), losses_of, optax.sgd(0.1), data)


@natural
def memmap():
    """Data in a file that does not fit into memory: windows of a memory-mapped array of tokens."""
    file = Path(tempfile.mkdtemp()) / "tokens.bin"
    ids(11, 64 * 6 + 1).astype(np.uint16).tofile(file)
    tokens = np.memmap(file, np.uint16, "r")

    class Windows:
        def __len__(self):
            return (len(tokens) - 1) // 6

        def __getitem__(self, i):
            return tokens[i * 6 : i * 6 + 7].astype(np.int32)

    def losses_of(params, tokens):
        x = jnp.cumsum(params["embed"][tokens[:, :-1]], 1) / jnp.arange(1, 7)[:, None]
        return cross_entropy(jnp.tanh(x) @ params["head"], tokens[:, 1:])

    init = functools.partial(weights, embed=(11, 16), head=(16, 11))
    made = mean_task(init, losses_of, optax.adam(1e-2), Windows(), "embed")
    whole = np.stack([Windows()[i] for i in range(64)])
    mean = lambda params, batch: losses_of(params, batch).mean()
    return made._replace(plain=lambda: train_plain(init, mean, optax.adam(1e-2), whole)[:3])


SHORT = {"data": {"shuffle": False, "drop_remainder": False}}
"""Settings for 56 rows, of which the last batch has a half."""


@natural
def ranking():
    """Ranking: each row is a query with its documents, some of them missing, and a softmax over those present."""
    data = {
        "docs": normal(56, 5, 8),
        "clicks": ids(2, 56, 5).astype(np.float32),
        "there": np.arange(5) < 2 + ids(4, 56)[:, None],
    }

    def losses_of(params, batch):
        scores = mlp(params, batch["docs"])[..., 0]
        log_p = jax.nn.log_softmax(jnp.where(batch["there"], scores, -1e9))
        return -jnp.where(batch["there"], batch["clicks"] * log_p, 0).sum(-1)

    weight_of = lambda batch: jnp.where(batch["there"], batch["clicks"], 0).sum(-1)

    def loss_fn(params, batch, key):
        clicks = weight_of(batch)
        return sk.mean(losses_of(params, batch) / jnp.maximum(clicks, 1), weights=clicks)

    init, optimizer = mlp_init(8, 16, 1), optax.adam(1e-2)
    loss_of = lambda params, batch: losses_of(params, batch).sum() / weight_of(batch).sum()
    task = sk.Task(init, loss_fn, optimizer, train_data=data, rules=[("up", [None, "mlp"])])
    return NaturalTask(task, lambda: train_plain(init, loss_of, optimizer, data)[:3], SHORT)


@natural
def tagging():
    """Tagging of sequences of different lengths: a mean over tokens without padding, and a short last batch."""
    data = {"x": normal(56, 6, 8), "tag": ids(3, 56, 6), "real": np.arange(6) < 1 + ids(6, 56)[:, None]}
    losses_of = lambda params, batch: cross_entropy(mlp(params, batch["x"]), batch["tag"])
    init, optimizer = mlp_init(8, 16, 3), optax.adamw(1e-2)
    loss_fn = lambda params, batch, key: sk.mean(losses_of(params, batch), where=batch["real"])
    loss_of = lambda params, batch: jnp.mean(losses_of(params, batch), where=batch["real"])
    task = sk.Task(init, loss_fn, optimizer, train_data=data, rules=[("up", [None, "mlp"])])
    return NaturalTask(task, lambda: train_plain(init, loss_of, optimizer, data)[:3], SHORT)


def two_phases(phase):
    """Pretraining on one target, then fine-tuning a new head on another from the same body."""
    init = mlp_init(12, 16, 12)
    reconstruction = lambda params, batch: ((mlp(params, batch["x"]) - batch["x"]) ** 2).sum(-1)
    pretraining = mean_task(init, reconstruction, optax.adam(1e-2), DATA)
    if phase == "pretraining":
        return pretraining
    body = pretraining.plain()[1]["up"]
    classification = lambda params, batch: cross_entropy(mlp(params, batch["x"]), batch["y"])
    return mean_task(lambda key: {"up": body, "down": jnp.zeros((16, 4))}, classification, optax.sgd(0.1), DATA)


two_phases = natural(two_phases, "finetuning", "pretraining")


@natural
def vae():
    """A variational autoencoder: one sample per example, reconstruction and divergence."""

    def init(key):
        a, b = jax.random.split(key)
        coder = {**weights(a, up=(12, 16), mean=(16, 3)), "log_var": jnp.zeros((16, 3))}
        return {"encoder": coder, "decoder": weights(b, up=(3, 16), down=(16, 12))}

    def losses_of(params, batch, keys):
        e = params["encoder"]
        h = jnp.tanh(batch["x"] @ e["up"])
        mean, log_var = h @ e["mean"], h @ e["log_var"]
        z = mean + jnp.exp(log_var / 2) * jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
        error = ((mlp(params["decoder"], z) - batch["x"]) ** 2).sum(-1)
        return error + 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)

    return mean_task(init, losses_of, optax.adam(1e-2), DATA, "encoder/up", keyed=True)
