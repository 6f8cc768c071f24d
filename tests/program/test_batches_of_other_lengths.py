"""A custom loop with batches of several lengths: one program per shape, each compiled once."""

import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.core_runs import program_of
from tests.support.fixed_numbers import normal

TOKENS = np.random.default_rng(0).integers(0, 9, (8, 9)).astype(np.int32)
LENGTHS = (9, 5, 9, 5, 3)


def init(key):
    return {"e": normal(0, 9, 8), "h": normal(1, 8, 9)}


def losses(params, tokens):
    logits = params["e"][tokens[:, :-1]] @ params["h"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_one_program_per_length(mesh, masked):
    traced = []

    def loss_fn(params, batch, key):
        traced.append(batch["t"].shape[1])
        return sk.mean(losses(params, batch["t"]))

    options = {"data": {"drop_remainder": False}} if masked else {}
    data = {"t": np.concatenate([TOKENS, TOKENS[:3]])}
    task = sk.Task(init, loss_fn, optax.adam(0.1), data)
    program = program_of(task, mesh=mesh, batch_size=8, **options)
    state = program.init()
    expected, tx = jax.device_get(state.params), optax.adam(0.1)
    opt_state, found = jax.jit(tx.init)(expected), []

    @jax.jit
    def stepped(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(lambda p: losses(p, tokens).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for length in LENGTHS:
        state, metrics = program.step(state, program.put({"t": TOKENS[:, :length]}))
        expected, opt_state, loss = stepped(expected, opt_state, TOKENS[:, :length])
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        found.append(len(traced))
    assert found[0] < found[1] == found[2] == found[3] < found[4] and int(state.step) == 5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, expected)
