"""A decoder in nnx with `with_partitioning`, and rules for a mesh (fsdp, tensor): the structure of flax's Gemma."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 16, 8, 16, 2, 32, 1
BATCH_SIZE, NUM_STEPS = 16, 5
AXIS_RULES = (("vocab", "tensor"), ("embed", "fsdp"), ("heads", "tensor"), ("hidden", "tensor"), ("norm", None))

mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def partitioned(*names):
    return nnx.with_partitioning(nnx.initializers.normal(0.2), names)


class RMSNorm(nnx.Module):
    def __init__(self, rngs):
        scale_init = nnx.with_partitioning(nnx.initializers.zeros_init(), ("norm",))
        self.scale = nnx.Param(scale_init(rngs.params(), (WIDTH,), jnp.float32))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + self.scale)


class Attention(nnx.Module):
    def __init__(self, rngs):
        qkv_init, out_init = partitioned(None, "embed", "heads", None), partitioned("heads", None, "embed")
        self.qkv = nnx.Param(qkv_init(rngs.params(), (3, WIDTH, HEADS, WIDTH // HEADS), jnp.float32))
        self.out = nnx.Param(out_init(rngs.params(), (HEADS, WIDTH // HEADS, WIDTH), jnp.float32))

    def __call__(self, x_BTD):
        q_BTNH, k_BTNH, v_BTNH = jnp.einsum("btd,cdnh->cbtnh", x_BTD, self.qkv[...])
        mixed_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True)
        return jnp.einsum("btnh,nhd->btd", mixed_BTNH, self.out[...])


class FeedForward(nnx.Module):
    def __init__(self, rngs):
        linear = lambda d_in, d_out, init: nnx.Linear(d_in, d_out, use_bias=False, kernel_init=init, rngs=rngs)
        self.gate = linear(WIDTH, HIDDEN, partitioned("embed", "hidden"))
        self.up = linear(WIDTH, HIDDEN, partitioned("embed", "hidden"))
        self.down = linear(HIDDEN, WIDTH, partitioned("hidden", "embed"))

    def __call__(self, x):
        return self.down(nnx.gelu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([RMSNorm(rngs), RMSNorm(rngs)])
        self.attention, self.mlp = Attention(rngs), FeedForward(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Param(partitioned("vocab", "embed")(rngs.params(), (VOCAB, WIDTH), jnp.float32))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.final_norm = RMSNorm(rngs)

    def __call__(self, tokens):
        x = self.embedding[tokens] * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x) @ self.embedding.T


def create_params(key):
    with nnx.logical_axis_rules(AXIS_RULES):
        return nnx.state(Transformer(nnx.Rngs(key)), nnx.Param)


with jax.set_mesh(mesh), nnx.logical_axis_rules(AXIS_RULES):
    graphdef, abstract_params = nnx.split(nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))))
    shardings = nnx.get_named_sharding(abstract_params, mesh)

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def loss_fn(params, batch):
    logits = nnx.merge(graphdef, params)(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.mean()


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def load_data():
    tokens = np.random.default_rng(0).integers(VOCAB, size=(NUM_STEPS * BATCH_SIZE, LENGTH + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def train():
    data, losses = load_data(), []
    with jax.set_mesh(mesh):
        params = jax.jit(create_params, out_shardings=shardings)(jax.random.key(0))
        opt_state = jax.jit(optimizer.init)(params)
        for i in range(NUM_STEPS):
            batch = {name: x[i * BATCH_SIZE : (i + 1) * BATCH_SIZE] for name, x in data.items()}
            batch = jax.device_put(batch, NamedSharding(mesh, P("fsdp")))
            params, opt_state, loss = train_step(params, opt_state, batch)
            losses.append(float(loss))
    return losses, params


if __name__ == "__main__":
    train()
