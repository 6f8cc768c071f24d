"""A decoder-only language model in the manner of flax's lm1b example: `jit` with shardings, logical axis rules, mesh
(data, fsdp, tensor).

Written as its `train.py` and `models.py` are: nothing of spmdkit is in it. What differs is the size, and that devices
are an argument.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.linen import partitioning as nn_partitioning  # noqa: F401 - as in the example
from flax.training import common_utils, train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

RULES = (
    ("activation_batch", ("data", "fsdp")),
    ("activation_length", None),
    ("activation_embed", "tensor"),
    ("embed", "fsdp"),
    ("mlp", "tensor"),
    ("heads", "tensor"),
    ("kv", None),
    ("vocab", "tensor"),
)


@struct.dataclass
class TransformerConfig:
    """Global hyperparameters, small."""

    vocab_size: int = 16
    emb_dim: int = 8
    num_heads: int = 2
    qkv_dim: int = 8
    mlp_dim: int = 16
    max_len: int = 8
    dropout_rate: float = 0.1
    deterministic: bool = False
    kernel_init: Any = nn.initializers.xavier_uniform()
    bias_init: Any = nn.initializers.normal(stddev=1e-6)


def shift_right(x, axis=1):
    pad_widths = [(0, 0)] * len(x.shape)
    pad_widths[axis] = (1, 0)
    return jnp.pad(x, pad_widths, constant_values=0)[:, :-1]


class MlpBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        dense = lambda width, names, of_bias: nn.Dense(
            width,
            kernel_init=nn.with_logical_partitioning(config.kernel_init, names),
            bias_init=nn.with_logical_partitioning(config.bias_init, of_bias),
        )
        x = nn.relu(dense(config.mlp_dim, ("embed", "mlp"), ("mlp",))(inputs))
        x = nn.with_logical_constraint(x, ("activation_batch", "activation_length", "mlp"))
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=config.deterministic)
        return dense(inputs.shape[-1], ("mlp", "embed"), ("embed",))(x)


class TransformerLM(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        embedding = nn.Embed(
            config.vocab_size,
            config.emb_dim,
            embedding_init=nn.with_logical_partitioning(nn.initializers.normal(stddev=1.0), ("vocab", "embed")),
        )
        y = embedding(shift_right(inputs).astype("int32"))
        y = nn.Dropout(rate=config.dropout_rate)(y, deterministic=config.deterministic)
        x = nn.LayerNorm(
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)),
            scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)),
        )(y)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            qkv_features=config.qkv_dim,
            kernel_init=nn.with_logical_partitioning(config.kernel_init, ("embed", "kv")),
            bias_init=nn.with_logical_partitioning(config.bias_init, ("embed",)),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=config.dropout_rate,
            deterministic=config.deterministic,
        )(x, mask=nn.make_causal_mask(inputs))
        y = y + x
        y = y + MlpBlock(config)(nn.LayerNorm()(y))
        y = nn.with_logical_constraint(y, ("activation_batch", "activation_length", "activation_embed"))
        return nn.Dense(
            config.vocab_size, kernel_init=nn.with_logical_partitioning(config.kernel_init, ("embed", "vocab"))
        )(y)


def compute_weighted_cross_entropy(logits, targets, weights):
    """Returns the sum of the losses and the sum of the weights."""
    soft_targets = common_utils.onehot(targets, logits.shape[-1])
    loss = -jnp.sum(soft_targets * nn.log_softmax(logits), axis=-1) * weights
    return loss.sum(), weights.sum()


def compute_metrics(logits, labels, weights):
    loss, weight_sum = compute_weighted_cross_entropy(logits, labels, weights)
    accuracy = (jnp.equal(jnp.argmax(logits, axis=-1), labels) * weights).sum()
    return {"loss": loss, "accuracy": accuracy, "denominator": weight_sum}


def train_step(state, batch, dropout_rng, config, cross_entropy=compute_weighted_cross_entropy):
    """Perform a single training step."""
    inputs = batch["inputs"]
    weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        logits = TransformerLM(config).apply({"params": params}, inputs, rngs={"dropout": dropout_rng})
        loss, weight_sum = cross_entropy(logits, inputs, weights)
        return loss / weight_sum, logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), compute_metrics(logits, inputs, weights)


def make(devices, fault=None):
    """Returns the step and its arguments on `devices` [data, fsdp, tensor], as `train_and_evaluate` makes them."""
    config, mesh = TransformerConfig(), Mesh(devices, ("data", "fsdp", "tensor"))
    model, tx = TransformerLM(config), optax.adamw(1e-2)
    apply_fn = model.apply

    def init_fn(rng):
        variables = model.init(rng, jnp.ones((2, config.max_len), jnp.float32))
        return train_state.TrainState.create(apply_fn=apply_fn, params=variables["params"], tx=tx)

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    logical = nn.get_partition_spec(jax.eval_shape(init_fn, rngs))
    state_sharding = nn.logical_to_mesh_sharding(logical, mesh, RULES)
    with mesh, nn.logical_axis_rules(RULES):
        boxed = jax.jit(init_fn, in_shardings=None, out_shardings=state_sharding)(rngs)
    state = nn.unbox(boxed)
    batch_sharding = NamedSharding(mesh, P(("data", "fsdp")))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (16, config.max_len)).astype(np.int32)
    step = functools.partial(train_step, config=config)
    if fault is not None:
        step = functools.partial(step, cross_entropy=FAULTS[fault](mesh))
    jitted = jax.jit(
        step,
        in_shardings=(nn.unbox(state_sharding), batch_sharding, None),
        out_shardings=(nn.unbox(state_sharding), None),
        donate_argnums=0,
    )

    def run(*args):
        with mesh, nn.logical_axis_rules(RULES):
            return jitted(*args)

    return run, (state, {"inputs": jax.device_put(tokens, batch_sharding)}, jax.random.key(2))


# ---- a loss by hand over the shards of the batch, with a fault
# ------------------------------------------------------------


def _by_shards(of_shard):
    """Returns the maker of a cross entropy that each device computes of its own rows."""

    def on(mesh):
        rows = P(("data", "fsdp"))

        def cross_entropy(*args):
            body = jax.shard_map(of_shard, mesh=mesh, in_specs=(rows,) * 3, out_specs=(P(), P()), check_vma=False)
            return body(*args)

        return cross_entropy

    return on


def _over_one_axis(logits, targets, weights):
    """The fsdp axis is forgotten."""
    return lax.psum(compute_weighted_cross_entropy(logits, targets, weights), "data")


def _mean_of_means(logits, targets, weights):
    """Each shard divides by its own weights."""
    loss, weight = compute_weighted_cross_entropy(logits, targets, weights)
    return lax.pmean(loss / weight, ("data", "fsdp")), jnp.ones(())


def _shifted(logits, targets, weights):
    """Each shard compares with the targets of its neighbour."""
    size = lax.axis_size("data")
    targets = lax.ppermute(targets, "data", [(i, (i + 1) % size) for i in range(size)])
    return lax.psum(compute_weighted_cross_entropy(logits, targets, weights), ("data", "fsdp"))


FAULTS = {
    name: _by_shards(fn) for name, fn in (("axis", _over_one_axis), ("means", _mean_of_means), ("shift", _shifted))
}
