"""Training steps that do not use spmdkit, each as `make(devices) -> (jitted step, arguments)`."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, HEAD, HIDDEN, VOCAB, LENGTH, BATCH = 2, 32, 4, 8, 96, 50, 12, 8


def shapes(mesh, tree, specs):
    """Returns shapes with shardings."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs
    )


# ---- a hand-written transformer --------------------------------------------------------------------------------------


def init_transformer():
    normal = lambda *shape: jnp.zeros(shape)
    heads = (LAYERS, WIDTH, HEADS, HEAD)
    block = {"q": normal(*heads), "k": normal(*heads), "v": normal(*heads), "o": normal(LAYERS, HEADS, HEAD, WIDTH)}
    block |= {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH)}
    return {"embed": normal(VOCAB, WIDTH), "blocks": block}


HEADS_SHARDED = P(None, None, "tp")
SPECS = {
    "embed": P(),
    "blocks": {"q": HEADS_SHARDED, "k": HEADS_SHARDED, "v": HEADS_SHARDED, "o": P(None, "tp")}
    | {"up": P(None, None, "tp"), "down": P(None, "tp")},
}


def transformer_loss(params, tokens):
    def block(x, w):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        probs = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        x = x + jnp.einsum("bhts,bshk,hkd->btd", probs, v, w["o"])
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["blocks"])
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_transformer(devices):
    mesh = Mesh(devices.reshape(-1, 2), ("dp", "tp"))
    optimizer = optax.adam(1e-3)

    def train_step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(transformer_loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.eval_shape(init_transformer)
    state = jax.eval_shape(optimizer.init, params)
    specs = optax.tree.map_params(optimizer, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: P())
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    arguments = shapes(mesh, params, SPECS), shapes(mesh, state, specs), tokens
    return jax.jit(train_step, donate_argnums=(0, 1)), arguments


# ---- equinox ---------------------------------------------------------------------------------------------------------


def make_equinox(devices):
    """An MLP; its weights are stored sharded over one axis, and gathered where they are used."""
    mesh = Mesh(devices, ("workers",))
    optimizer = optax.sgd(0.1, momentum=0.9)
    model = eqx.filter_eval_shape(eqx.nn.MLP, 16, 16, 64, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    sharded = lambda tree: shapes(mesh, tree, jax.tree.map(lambda _: P("workers"), tree))
    model = eqx.combine(sharded(arrays), static)
    state = sharded(eqx.filter_eval_shape(optimizer.init, arrays))

    @eqx.filter_jit(donate="all")
    def step(model, opt_state, x, y):
        def loss_of(model):
            model = eqx.filter_shard(model, NamedSharding(mesh, P()))
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_of)(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    rows = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, P("workers")))
    return step, (model, state, rows, rows)


# ---- explicit mode ---------------------------------------------------------------------------------------------------


def make_explicit(devices):
    """A linear layer in explicit mode, with the mesh set for the whole program."""
    mesh = Mesh(devices.reshape(4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    jax.set_mesh(mesh)

    @jax.jit
    def step(w, x):
        def loss(w):
            y = jnp.einsum("bi,io->bo", x, w, out_sharding=P("x", None))  # sums over y
            return (jax.sharding.reshard(y, P("x", "y")) ** 2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    shape = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    return step, (shape((48, 24), P("y", None)), shape((16, 48), P("x", "y")))


# ---- like flax's mnist -----------------------------------------------------------------------------------------------


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))


def make_mnist(devices):
    """A train state of flax, replicated; the batch is sharded. The step is jitted with shardings; its arguments have
    none."""
    mesh = Mesh(devices, ("batch",))
    model = CNN()

    def create():
        params = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, 0.9))

    def train_step(state, batch):
        def loss(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    batch = {
        "image": jax.ShapeDtypeStruct((16, 8, 8, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((16,), jnp.int32),
    }
    return jax.jit(train_step, in_shardings=(replicated, rows)), (jax.eval_shape(create), batch)
