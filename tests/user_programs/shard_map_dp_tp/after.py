"""An MLP in one shard_map over ("dp", "tp"): data parallel, and tensor parallel by a psum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import spmdkit as sk

WIDTH, HIDDEN, OUT = 8, 16, 4
BATCH_SIZE, NUM_STEPS = 16, 5

tx = optax.sgd(0.05, momentum=0.9)
param_specs = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp", None)}


def init(key):
    keys = jax.random.split(key)
    up, down = 0.3 * jax.random.normal(keys[0], (WIDTH, HIDDEN)), 0.3 * jax.random.normal(keys[1], (HIDDEN, OUT))
    params = {"up": up, "bias": jnp.zeros(HIDDEN), "down": down}
    return {"params": params, "opt_state": tx.init(params)}


def loss_fn(params, batch):
    hidden = jax.nn.gelu(batch["x"] @ params["up"] + params["bias"])
    out = lax.psum(hidden @ params["down"], "tp")
    return lax.pmean(jnp.mean((out - batch["y"]) ** 2), "dp")


value_and_grad = jax.shard_map(
    jax.value_and_grad(loss_fn), in_specs=(param_specs, P("dp")), out_specs=(P(), param_specs)
)


def load_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_STEPS * BATCH_SIZE, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ rng.normal(size=(WIDTH, OUT)).astype(np.float32))}


@jax.jit
def train_step(state, batch):
    loss, grads = value_and_grad(state["params"], batch)
    updates, opt_state = tx.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}


view = sk.StateView(params="params", opt_state="opt_state")
task = sk.Task(init, train_step=train_step, state=view, train_data=load_data())
