"""What groups that agree after every step make of a short batch: metrics are weighted by counts, parameters are the
plain mean of the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.core_models import regression_data
from tests.support.core_runs import assert_close, program_of

GROUPS, RATE = 4, 0.05
DATA = regression_data(44, 0)
"""With batches of 32 the second step has 12 rows: 8 of the first group, 4 of the second, none of the others."""


def init(key):
    return {"w": jnp.full((16, 8), 0.1)}


def error_of(params, rows):
    return ((rows["x"] @ params["w"] - rows["y"]) ** 2).sum(-1)


def loss_fn(params, batch, key):
    error = error_of(params, batch)
    return sk.mean(error), {"weighed": sk.mean(error, weights=batch["weight"]), "sum": sk.sum(error)}


def train(sync, mesh):
    """Returns (parameters, metrics) after each of two steps, and the rows of each group in them."""
    task = sk.Task(init, loss_fn, optax.sgd(RATE), train_data=DATA)
    made = program_of(task, sync=sync, steps=2, mesh=mesh, data={"drop_remainder": False})
    state, found, rows = made.init(), [], []
    for _, batch in made.batches():
        state, metrics = made.step(state, batch)
        found.append((jax.device_get(state.params), jax.device_get(made.metrics(metrics))))
        mask = np.asarray(batch.mask).reshape(GROUPS, -1)
        cut = lambda x, mask=mask: [
            part[own] for part, own in zip(np.asarray(x).reshape(GROUPS, -1, *x.shape[1:]), mask, strict=True)
        ]
        rows.append({name: cut(x) for name, x in batch.examples.items()})
    return found, rows


def test_metrics_cover_all_rows_parameters_are_plain_mean():
    found, rows = train({"local_sgd": {"every": 1}}, {"data": GROUPS})
    plain, _ = train("every_step", {"data": GROUPS})
    assert [len(x) for x in rows[1]["x"]] == [8, 4, 0, 0]
    for (_, metrics), (_, expected) in zip(found, plain, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    first, second = (jax.tree.map(lambda x: x[0], params) for params, _ in found)
    assert_close(first, plain[0][0])

    gradient = jax.jit(jax.grad(lambda params, own: error_of(params, own).mean()))
    moved = [first] * 2
    for group in (0, 1):
        own = {name: x[group] for name, x in rows[1].items()}
        moved[group] = jax.tree.map(lambda p, g: p - RATE * g, first, jax.device_get(gradient(first, own)))
    assert_close(second, jax.tree.map(lambda a, b, rest: (a + b + 2 * rest) / GROUPS, *moved, first))
