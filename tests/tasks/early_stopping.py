"""Early stopping on a held-out set, the best parameters kept, in a loop of one's own."""

import jax
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import Trained, batches, program_of
from tests.tasks.classifier import init, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(160, 12)).astype(np.float32), "y": random.integers(0, 4, 160).astype(np.int32)}


TEST = jax.tree.map(lambda x: x[128:], DATA)
TRAIN = jax.tree.map(lambda x: x[:128], DATA)
optimizer = optax.sgd(2.0)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain():
    params, losses, best, bad = init(jax.random.key(0)), [], (np.inf, None), 0
    opt_state = optimizer.init(params)
    for batch in batches(TRAIN, 8):
        params, opt_state, _ = plain_step(params, opt_state, batch)
        losses.append(float(losses_of(params, TEST).mean()))
        bad = 0 if losses[-1] < best[0] else bad + 1
        best = (losses[-1], params) if bad == 0 else best
        if bad == 2:
            break
    return losses, best[1], opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=TRAIN, eval_data=TEST, rules=[("up", [None, "mlp"])])


def loop(program):
    state, losses, best, bad = program.init(), [], (np.inf, None), 0
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
        losses.append(program.eval(state)["loss"])
        bad = 0 if losses[-1] < best[0] else bad + 1
        best = (losses[-1], jax.device_get(state.params)) if bad == 0 else best
        if bad == 2:
            break
    return Trained(losses, best[1], state, program)


# ---- checks ----------------------------------------------------------------------------------------------------------


def run(mesh):
    return loop(program_of(task, mesh, steps=8))
