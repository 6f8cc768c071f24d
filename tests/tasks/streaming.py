"""Data from a generator without an index, in a custom loop."""

import jax
import optax

import spmdkit as sk
from tests.support.tasks import Trained, program_of
from tests.tasks.classifier import DATA, init, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------


def stream():
    for i in range(4):
        yield jax.tree.map(lambda x, i=i: x[i * 16 : i * 16 + 16], DATA)


optimizer = optax.sgd(0.2, momentum=0.9)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for batch in stream():
        params, opt_state, loss = plain_step(params, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


shapes = jax.tree.map(lambda x: x[:16], DATA)  # a task has data: here only their shapes
task = sk.Task(init, loss_fn, optimizer, train_data=shapes, rules=[("up", [None, "mlp"])])


def loop(program):
    state, losses = program.init(), []
    for batch in stream():
        state, metrics = program.step(state, program.put(batch))
        losses.append(metrics["loss"])
    return Trained(losses, jax.device_get(state.params), state, program)


# ---- checks ----------------------------------------------------------------------------------------------------------


def run(mesh):
    return loop(program_of(task, mesh))
