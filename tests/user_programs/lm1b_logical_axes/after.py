"""A decoder in linen with logical axes, and rules for a mesh (data, fsdp, tensor): the structure of flax's lm1b."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import spmdkit as sk

VOCAB, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 16, 8, 16, 2, 32, 1
BATCH_SIZE, NUM_STEPS = 16, 5
LOGICAL_AXIS_RULES = [
    ["activation_batch", ["data", "fsdp"]],
    ["mlp", "tensor"],
    ["vocab", "tensor"],
    ["embed", "fsdp"],
    ["heads", "tensor"],
]
KERNEL_INIT = nn.initializers.xavier_uniform()


def layer_norm():
    scale_init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
    return nn.LayerNorm(use_bias=False, scale_init=scale_init)


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = nn.Dense(HIDDEN, use_bias=False, kernel_init=nn.with_logical_partitioning(KERNEL_INIT, ("embed", "mlp")))
        down = nn.Dense(WIDTH, use_bias=False, kernel_init=nn.with_logical_partitioning(KERNEL_INIT, ("mlp", "embed")))
        x = nn.with_logical_constraint(nn.relu(up(x)), ("activation_batch", None, "mlp"))
        return nn.with_logical_constraint(down(x), ("activation_batch", None, None))


class DecoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        kernel_init = nn.with_logical_partitioning(KERNEL_INIT, ("embed", "kv"))
        attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, kernel_init=kernel_init)
        x = x + attention(layer_norm()(x), mask=mask)
        return x + MlpBlock()(layer_norm()(x))


class TransformerLM(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        mask = nn.combine_masks(nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs))
        embedding_init = nn.with_logical_partitioning(nn.initializers.normal(stddev=1.0), ("vocab", "embed"))
        x = nn.Embed(VOCAB, WIDTH, embedding_init=embedding_init)(jnp.pad(inputs[:, :-1], ((0, 0), (1, 0))))
        for _ in range(LAYERS):
            x = DecoderBlock()(x, mask)
        kernel_init = nn.with_logical_partitioning(KERNEL_INIT, ("embed", "vocab"))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=kernel_init, name="logits")(layer_norm()(x))


model = TransformerLM()
tx = optax.adamw(1e-2, b1=0.9, b2=0.98, eps=1e-6, weight_decay=0.1)


def init_train_state(key):
    variables = model.init(key, jnp.ones((1, LENGTH), jnp.int32))
    return train_state.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)


def train_step(state, batch):
    weights = jnp.where(batch["inputs"] > 0, 1.0, 0.0)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["inputs"])
        return (losses * weights).sum() / weights.sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def load_data():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, size=(NUM_STEPS * BATCH_SIZE, LENGTH)).astype(np.int32)
    return {"inputs": tokens * (np.arange(LENGTH) < rng.integers(4, LENGTH + 1, size=(len(tokens), 1)))}


nn.set_logical_axis_rules(LOGICAL_AXIS_RULES)
task = sk.Task(init_train_state, train_step=train_step, train_data=load_data())
