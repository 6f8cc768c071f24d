"""An equinox module: its arrays are trained, its functions are not."""

import equinox as eqx
import jax
import optax

import spmdkit as sk
from tests.support.tasks import batches
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def make(key):
    return eqx.nn.MLP(12, 4, 16, 1, activation=jax.nn.gelu, key=key)


def losses_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch["x"]), batch["y"])


optimizer = optax.adamw(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@eqx.filter_jit
def plain_step(model, opt_state, batch):
    loss, grads = eqx.filter_value_and_grad(lambda model: losses_of(model, batch).mean())(model)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def plain():
    model, losses = make(jax.random.key(0)), []
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    for batch in batches(DATA):
        model, opt_state, loss = plain_step(model, opt_state, batch)
        losses.append(loss)
    return losses, eqx.filter(model, eqx.is_array), opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------

static = eqx.filter(make(jax.random.key(0)), eqx.is_array, inverse=True)


def init(key):
    return eqx.filter(make(key), eqx.is_array)


def loss_fn(params, batch, key):
    return sk.mean(losses_of(eqx.combine(params, static), batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("layers/0/weight", ["mlp", None])])
