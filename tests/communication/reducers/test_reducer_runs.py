"""What holds of a run under every reducer: it learns with replicas of the same bits, equals the sum under other
settings, and survives NaN."""

import jax
import numpy as np
import optax
import pytest

from tests.communication.reducers.test_reducer_contract import ANOTHER_SUM, ROWS, chosen, lossless
from tests.communication.reducers.test_reducer_restore import made
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.reducer_runs import adam, assert_same_replicas, bits, data, loss_fn, program, task, train


@pytest.mark.parametrize("name", slow_except({"int8", "hierarchical"}, ROWS))
def test_replicas_are_bitwise_equal_while_it_learns(name):
    state, losses = train(made(name), 80)
    assert_same_replicas((state.params, state.opt_state))
    assert np.isfinite(losses).all() and np.mean(losses[-8:]) < 0.5 * np.mean(losses[:8])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"sum", *ANOTHER_SUM}))
def test_exact_options_equal_sum_under_all_settings(name):
    mesh = {"mesh": {"replica": 2, "data": 2}}
    precision = {"compute": "bfloat16", "reduction": "float32"}
    settings = {"microbatches": 2, "clip_norm": 0.5, "ema": 0.9, "precision": precision}
    expected, losses = train(program(mesh, "sum", adam(), **settings), 4)
    state, found = train(program(mesh, lossless(name), adam(), **settings), 4)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    assert_close(state.params, expected.params, 1e-4)
    assert_close(state.ema, expected.ema, 1e-4)


@pytest.mark.parametrize("name", slow_except({"int8"}, sorted(ROWS.keys() - {"sum", "ordered"})))
def test_non_finite_gradient_is_seen_and_residual_unchanged(name):
    one_example = data(67)["weight"].max()

    def poisoned(params, batch, key):
        loss, metrics = loss_fn(params, batch, key)
        return loss * jax.numpy.where(batch["weight"].max() == one_example, jax.numpy.nan, 1.0), metrics

    mesh = {"mesh": {"replica": 2, "data": 2}}
    guarded = program(mesh, chosen(name), task(optax.sgd(1e-2), loss_fn=poisoned), on_nonfinite="skip", steps=6)
    state, skipped = guarded.init(), 0
    for _, batch in guarded.batches(1, 6):
        before = bits((state.params, state.reducer))
        state, metrics = guarded.step(state, batch)
        if not np.isfinite(float(metrics["loss"])):
            skipped += 1
            assert bits((state.params, state.reducer)) == before
    assert 0 < skipped < 6
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((state.params, state.reducer)))
