"""A residual network under pmap, with batch statistics of each device: the structure of flax's ImageNet example."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state
from jax import lax

NUM_CLASSES, BATCH_SIZE, NUM_STEPS = 5, 16, 5


class ResNet(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train=True):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        x = nn.relu(norm()(conv(8, (3, 3), strides=2)(x)))
        residual = norm(scale_init=nn.initializers.zeros)(conv(8, (3, 3))(x))
        x = nn.relu(x + residual).mean(axis=(1, 2))
        return nn.Dense(self.num_classes)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


def load_data():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(NUM_STEPS * BATCH_SIZE, 8, 8, 3)).astype(np.float32)
    return {"image": images, "label": rng.integers(NUM_CLASSES, size=len(images)).astype(np.int32)}


def create_train_state(key):
    model = ResNet(NUM_CLASSES)
    variables = model.init(key, jnp.ones((1, 8, 8, 3)))
    schedule = optax.cosine_decay_schedule(0.1, NUM_STEPS)
    tx = optax.sgd(schedule, momentum=0.9, nesterov=True)
    return TrainState.create(apply_fn=model.apply, tx=tx, **variables)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy(logits, common_utils.onehot(labels, NUM_CLASSES))


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        loss = jnp.mean(cross_entropy(logits, batch["label"])) + 5e-5 * penalty
        return loss, (new_model_state, logits)

    (loss, (new_model_state, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    metrics = lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="batch")
    batch_stats = lax.pmean(new_model_state["batch_stats"], axis_name="batch")
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False)
    loss = cross_entropy(logits, batch["label"])
    return {"loss": lax.pmean(jnp.mean(loss), axis_name="batch")}


def train():
    data = load_data()
    state = jax_utils.replicate(create_train_state(jax.random.key(0)))
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
    p_eval_step = jax.pmap(eval_step, axis_name="batch")
    losses = []
    for i in range(NUM_STEPS):
        batch = {name: x[i * BATCH_SIZE : (i + 1) * BATCH_SIZE] for name, x in data.items()}
        state, metrics = p_train_step(state, common_utils.shard(batch))
        losses.append(float(jax_utils.unreplicate(metrics)["loss"]))
    metrics = p_eval_step(state, common_utils.shard(data))
    print("evaluation:", jax_utils.unreplicate(metrics))
    return losses, jax_utils.unreplicate(state).params


if __name__ == "__main__":
    train()
