"""One deliberately bad program for each finding. The line that causes it ends with `# bad: <code>`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.step.trace_context import current

BOUND = {"replicate_above_bytes": 2**16}
TABLE = np.linspace(0, 1, 256 * 256, dtype=np.float32).reshape(256, 256)


def lines_to_blame(code):
    """Returns `file:line` of the lines of this file that are marked with a code."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    return [f"{__file__}:{n}" for n, text in lines if text.endswith(f"# bad: {code}")]


def data(rows=512, width=256, **more):
    x = np.zeros((rows, width), np.float32)
    return {"x": x, "y": x} | more


def task(loss, params=None, **changes):
    shapes = params or {"up": (256, 512), "down": (512, 256)}
    init = lambda key: {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return sk.Task(init, loss, **{"optimizer": optax.sgd(0.1), "train_data": data()} | changes)


def error(y, batch):
    return sk.mean(((y - batch["y"]) ** 2).mean(-1))


def good_loss(params, batch, key):
    h = jnp.tanh(sk.shard(batch["x"] @ params["up"], "batch", "mlp"))
    return error(h @ params["down"], batch)


def silent_replication_of_a_parameter():
    def loss(params, batch, key):
        h = batch["x"] @ params["large"]  # bad: silent-replication
        return error(jnp.tanh(h) @ params["up"] @ params["down"], batch)

    shapes = {"large": (256, 256), "up": (256, 512), "down": (512, 256)}
    rules = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]
    return task(loss, shapes, rules=rules), {"mesh": {"data": 4, "tensor": 2}, "layout": BOUND}


def silent_replication_of_an_activation():
    def loss(params, batch, key):
        h = jnp.tanh(sk.shard(batch["x"] @ params["up"], None, None))  # bad: silent-replication
        return error(h @ params["down"], batch)

    return task(loss), {"mesh": {"fsdp": 8}, "layout": BOUND | {"min_shard_bytes": 1}, "batch_size": 512}


def full_rematerialization():
    def cut(*dims):
        return NamedSharding(current().sharding.mesh, PartitionSpec(*dims))

    def loss(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["up"]).reshape(-1, 4, 128)
        h = lax.with_sharding_constraint(h, cut(None, "expert", "tensor"))  # bad: full-rematerialization
        h = lax.with_sharding_constraint(jnp.sin(h), cut(None, ("fsdp", "tensor", "expert"), None))
        return error(jnp.tanh(h).reshape(-1, 512) @ params["down"], batch)

    rules = [("up", ["fsdp", "tensor"]), ("down", ["tensor", "fsdp"])]
    return task(loss, rules=rules), {"mesh": {"fsdp": 2, "expert": 2, "tensor": 2}, "batch_size": 512}


def collective_in_accumulation_loop():
    def train_step(state, batch):
        def one(total, rows):
            grads = jax.grad(lambda p: good_loss(p, rows, None).sum / 32)(state.params)
            grads = lax.psum(grads, ("replica", "data"))  # bad: collective-in-accumulation-loop
            return jax.tree.map(jnp.add, total, grads), None

        rows = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        grads, _ = lax.scan(one, {name: jnp.zeros(x.shape) for name, x in state.params.items()}, rows)
        return state.apply_gradients(grads), {}

    return task(None, train_step=train_step, view="replica"), {"mesh": {"data": 8}}


def gather_of_unsharded():
    def loss(params, batch, key):
        table = sk.shard(batch["table"], None, None)  # bad: gather-of-unsharded
        h = jnp.tanh(batch["x"] @ params["up"])
        # jax 0.10 says the line of the constraint, 0.11 that of the sum.
        return error(h @ params["down"] + (table @ params["up"]).sum(), batch)  # bad: gather-of-unsharded

    return task(loss, train_data=data(table=np.zeros((512, 256), np.float32))), {"mesh": {"fsdp": 8}, "batch_size": 512}


def float32_on_the_wire():
    def loss(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["up"])
        others = lax.all_gather(h.astype(jnp.float32), "data", tiled=True)  # bad: float32-on-the-wire
        return error(h @ params["down"], batch) + (h @ others.astype(jnp.bfloat16).T).mean().astype(jnp.float32)

    return task(loss), {"mesh": {"data": 8}, "precision": "bfloat16", "batch_size": 512}


def recompilation_risk():
    def loss(params, batch, key):
        x = batch["x"] @ jnp.asarray(TABLE)  # bad: recompilation-risk
        return error(jnp.tanh(x @ params["up"]) @ params["down"], batch)

    return task(loss), {"mesh": {"data": 8}}


def donation_not_used():
    def update(grads, state, params=None):
        return grads, jax.tree.map(lambda g: g * 2, grads)  # bad: donation-not-used

    keep = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    return task(good_loss, optimizer=optax.chain(keep, optax.sgd(0.1))), {"mesh": {"data": 8}}


def axis_crosses_slow_links():
    def loss(params, batch, key):
        h = sk.shard(jnp.tanh(batch["x"] @ params["up"]), "batch", None)  # bad: axis-crosses-slow-links
        return error(sk.shard(h @ params["down"], "batch", None), batch)  # bad: axis-crosses-slow-links

    return task(loss, {"up": (256, 1024), "down": (1024, 256)}), {"mesh": {"fsdp": 8}, "batch_size": 512}


def batch_too_small():
    """At the size of a real layer: 64 Mi parameters on two hosts, 8 examples. Compiled, never run."""

    def loss(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["up"])
        return error(h @ params["down"], batch)

    wide = {"up": (4096, 8192), "down": (8192, 4096)}
    return task(loss, wide, train_data=data(rows=8, width=4096)), {"mesh": {"data": 8}, "batch_size": 8}


def padding_waste():
    """On a TPU: windows of 64 positions, whose scores lie in tiles of 128."""

    def loss(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["up"]).reshape(-1, 64, 8)
        scores = jnp.einsum("bnh,bmh->bnm", h, h)  # bad: padding-waste
        mixed = jnp.einsum("bnm,bmh->bnh", jax.nn.softmax(scores), h)  # bad: padding-waste
        return error(mixed.reshape(-1, 512) @ params["down"], batch)

    return task(loss, train_data=data(rows=16384)), {"mesh": {"data": 8}, "batch_size": 16384}


def rollout(points_of, mesh):
    """A loss at points that do not come from the batch."""

    def train_step(state, batch):
        def loss(params):
            return jnp.mean((points_of(state.key) @ params["up"]) ** 2)  # bad: repeated-work

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads), {"loss": value}

    return task(None, {"up": (256, 512)}, train_step=train_step), {"mesh": mesh, "batch_size": 512}


def repeated_work():
    """Each of 8 devices computes all points."""
    return rollout(lambda key: jax.random.normal(key, (512, 256)), {"data": 8})


def shared_work():
    def points_of(key):
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(sk.sharded_arange(512))
        return jax.vmap(lambda key: jax.random.normal(key, (256,)))(keys)

    return rollout(points_of, {"data": 4, "fsdp": 2})


def many_small_all_reduces():
    def loss(params, batch, key):
        def one(x, _):
            return jnp.tanh(x - lax.psum(x, "data")), None  # bad: many-small-all-reduces

        x, _ = lax.scan(one, batch["x"][0], length=128)
        return error(jnp.tanh((batch["x"] + x) @ params["up"]) @ params["down"], batch)

    return task(loss), {"mesh": {"data": 8}}


def unused_parameter():
    shapes = {"up": (256, 512), "down": (512, 256), "extra": (256, 256)}

    def init(key):  # bad: unused-parameter
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    return sk.Task(init, good_loss, optax.adam(0.1), train_data=data()), {"mesh": {"data": 8}}


def host_callback():
    def loss(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["up"])
        jax.debug.callback(lambda h: None, h)  # bad: host-callback
        return error(h @ params["down"], batch)

    return task(loss), {"mesh": {"data": 8}}


def quadratic_scores():
    def loss(params, batch, key):
        h = (batch["x"] @ params["up"]).reshape(-1, 1024, 2, 64)
        scores = jnp.einsum("btnh,bsnh->bnts", h, h)  # bad: quadratic-scores
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), h)  # bad: quadratic-scores
        return error(mixed.reshape(-1, 128) @ params["down"], batch)

    shapes = {"up": (256, 128), "down": (128, 256)}
    return task(loss, shapes, train_data=data(rows=32768)), {"mesh": {"data": 8}, "batch_size": 32768}


def dense_table_gradient():
    def loss(params, batch, key):
        h = params["table"][batch["ids"]]  # bad: dense-table-gradient
        return error(h @ params["down"], batch)

    train_data = data(ids=np.zeros(512, np.int32))
    shapes = {"table": (4096, 128), "down": (128, 256)}
    return task(loss, shapes, train_data=train_data), {"mesh": {"data": 8}, "batch_size": 512}


def padded_dim():
    """Six heads over four devices."""

    def loss(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["up"]).reshape(-1, 6, 128)
        sharding = NamedSharding(current().sharding.mesh, PartitionSpec(None, "tensor"))
        h = lax.with_sharding_constraint(h, sharding)  # bad: padded-dim
        return error(jnp.sin(h).reshape(-1, 768) @ params["down"], batch)

    rules = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]
    made = task(loss, {"up": (256, 768), "down": (768, 256)}, rules=rules)
    return made, {"mesh": {"fsdp": 2, "tensor": 4}, "batch_size": 512}
