"""Models of flax's own examples (mnist in nnx, wmt, vae, ogbg_molpcba), small, as tasks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmdkit as sk

NUM = 48
REPLICAS = ("replica", "data")
random = np.random.default_rng(0)
IMAGES = {
    "image": random.uniform(size=(NUM, 8, 8, 1)).astype(np.float32),
    "label": random.integers(0, 4, NUM).astype(np.int32),
}
LENGTHS = random.integers(3, 9, NUM)
TOKENS = (random.integers(1, 13, (NUM, 8)) * (np.arange(8) < LENGTHS[:, None])).astype(np.int32)
ce = optax.softmax_cross_entropy_with_integer_labels


def constant(make):
    """Returns `init` of parameters that are made now."""
    made = make(jax.random.key(0))
    return lambda key: made


class NnxCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(4, axis_name=REPLICAS, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.0, rngs=rngs)
        self.linear1 = nnx.Linear(64, 8, rngs=rngs)
        self.linear2 = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x)))), (2, 2), strides=(2, 2))
        return self.linear2(nnx.relu(self.linear1(x.reshape(x.shape[0], -1))))


def mnist_nnx():
    graphdef, params, rest = nnx.split(NnxCNN(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, rest, batch, key):
        model = nnx.merge(graphdef, params, rest, copy=True)
        losses = ce(model(batch["image"]), batch["label"])
        return sk.mean(losses), {}, nnx.split(model, nnx.Param, ...)[2]

    return sk.Task(lambda key: sk.Variables(params, rest), loss_fn, optax.adamw(5e-3, 0.9), train_data=IMAGES)


class TransformerLM(nn.Module):
    @nn.compact
    def __call__(self, inputs, train=True):
        embed = nn.Embed(13, 8, embedding_init=nn.initializers.normal(stddev=1.0))
        shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        place = self.param("posembed", nn.initializers.normal(0.02), (1, 8, 8))
        mask = nn.combine_masks(nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs))
        x = embed(shifted) + place
        for _ in range(2):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, deterministic=True)(h, h, mask=mask)
            x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x)) / np.sqrt(8)


def wmt(smoothing=0.1):
    def loss_fn(params, batch, key):
        logits, weights = TransformerLM().apply({"params": params}, batch), (batch > 0).astype(jnp.float32)
        high, low = 1 - smoothing, smoothing / 12
        normalizing = -(high * np.log(high) + 12 * low * np.log(low + 1e-20))
        soft = jax.nn.one_hot(batch, 13) * (high - low) + low
        loss = -jnp.sum(soft * nn.log_softmax(logits), -1) - normalizing
        accuracy = (logits.argmax(-1) == batch).astype(jnp.float32)
        return sk.mean(loss, weights=weights), {"accuracy": sk.mean(accuracy, weights=weights)}

    schedule = lambda step: 0.02 * jnp.minimum(1.0, (step + 1) / 2) / jnp.sqrt(jnp.maximum(step, 2))
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    rules = [(".*Dense_0/kernel", [None, "mlp"]), (".*Dense_1/kernel", ["mlp", None])]
    init = constant(lambda key: TransformerLM().init(key, TOKENS[:1])["params"])
    return sk.Task(init, loss_fn, tx, train_data=TOKENS, rules=rules)


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, keys):
        h = nn.relu(nn.Dense(16, name="fc1")(x))
        mean, logvar = nn.Dense(4, name="fc2_mean")(h), nn.Dense(4, name="fc2_logvar")(h)
        eps = jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)
        z = mean + jnp.exp(0.5 * logvar) * eps
        return nn.Dense(64, name="fc4")(nn.relu(nn.Dense(16, name="fc3")(z))), mean, logvar


def vae():
    def loss_fn(params, batch, key):
        x = batch["image"].reshape(len(batch["image"]), -1)
        logits, mean, logvar = VAE().apply({"params": params}, x, sk.example_keys())
        logits = nn.log_sigmoid(logits)
        bce = -jnp.sum(x * logits + (1.0 - x) * jnp.log(-jnp.expm1(logits)), -1)
        kld = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1)
        return sk.mean(bce + kld), {"bce": sk.mean(bce), "kld": sk.mean(kld)}

    keys = jax.random.split(jax.random.key(1), 1)
    init = constant(lambda key: VAE().init(key, np.zeros((1, 64), np.float32), keys)["params"])
    return sk.Task(init, loss_fn, optax.adam(1e-3), train_data=IMAGES)


class Graphs(nn.Module):
    @nn.compact
    def __call__(self, nodes, edges, real):
        h = nn.Dense(16)(nodes)
        for _ in range(2):
            h = nn.LayerNorm()(h + edges @ nn.relu(nn.Dense(16)(h)) / edges.sum(-1, keepdims=True))
        return nn.Dense(3)((h * real[..., None]).sum(1) / real.sum(1, keepdims=True))


def ogbg_molpcba():
    real = np.arange(8) < LENGTHS[:, None]
    edges = (random.uniform(size=(NUM, 8, 8)) < 0.4) | np.eye(8, dtype=bool)
    labels = random.integers(0, 2, (NUM, 3)).astype(np.float32)
    data = {
        "nodes": random.normal(size=(NUM, 8, 4)).astype(np.float32),
        "edges": (edges & real[:, None]).astype(np.float32) + np.eye(8, dtype=np.float32),
        "real": real.astype(np.float32),
        "labels": np.where(random.uniform(size=(NUM, 3)) < 0.4, np.nan, labels).astype(np.float32),
    }
    inputs = lambda batch: (batch["nodes"], batch["edges"], batch["real"])

    def loss_fn(params, batch, key):
        logits, known = Graphs().apply({"params": params}, *inputs(batch)), ~jnp.isnan(batch["labels"])
        loss = optax.sigmoid_binary_cross_entropy(logits, jnp.where(known, batch["labels"], -1))
        return sk.mean(loss, where=known)

    init = constant(lambda key: Graphs().init(key, *inputs(jax.tree.map(lambda x: x[:1], data)))["params"])
    return sk.Task(init, loss_fn, optax.adam(1e-3), train_data=data)


ALL = (mnist_nnx, wmt, vae, ogbg_molpcba)
TASKS = {f.__name__: f for f in ALL}
"""Name -> what makes the task."""
