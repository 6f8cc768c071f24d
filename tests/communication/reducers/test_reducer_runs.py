"""What holds of a run under every reducer: replicas of the same bits after 200 steps, a restart bit for bit, another
number of replicas, other settings, NaN."""

import functools

import jax
import numpy as np
import optax
import pytest

from spmdkit.checkpoint import Checkpoints
from spmdkit.foundation import plugins
from spmdkit.program.restore import restored
from tests.communication.reducers.test_reducer_contract import ROWS, STATEFUL, chosen, lossless, once_of_each
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.reducer_runs import data, loss_fn, owed, program, task, train

OTHERS = [name for name in ROWS if name not in ("sum", "ordered")]
FOUR = {name: {"mesh": {"replica": 2, "data": 2} if name == "hierarchical" else {"data": 4}} for name in ROWS}
OTHER = {name: {"mesh": {"replica": 2, "tensor": 2}} for name in ROWS}
OTHER["hierarchical"] = {"mesh": {"replica": 2, "data": 2, "tensor": 2}}


@functools.cache
def adam():
    return task(optax.adam(1e-2, eps=1e-3))


@functools.cache
def made(name):
    return program(FOUR[name], chosen(name), adam(), steps=200)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


def differing_copies(tree):
    """Returns how many leaves have shards of one index with different bits."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        found += any(len(bits) > 1 for bits in by_index.values())
    return found


@pytest.mark.parametrize("name", slow_except(set(OTHERS) - {"float8", "sign"}, ROWS))
def test_replicas_are_bitwise_equal_after_200_steps(name):
    state, losses = train(made(name), 200)
    assert differing_copies((state.params, state.opt_state)) == 0
    assert np.isfinite(losses).all() and np.mean(losses[-8:]) < 0.5 * np.mean(losses[:8])


@pytest.mark.forms(3)
@pytest.mark.parametrize("name", once_of_each(STATEFUL))
def test_resume_is_bitwise_only_with_the_residual(name, tmp_path):
    state, _ = train(made(name), 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    expected, _ = train(made(name), 3, state, 4)
    state, _, lines = restored(checkpoints, 3, made(name))
    forgotten, _, _ = restored(checkpoints, 3, made(name))
    forgotten = forgotten.replace(reducer=jax.tree.map(lambda x: 0 * x, forgotten.reducer))
    state, _ = train(made(name), 3, state, 4)
    forgotten, _ = train(made(name), 3, forgotten, 4)
    assert bits(state) == bits(expected) and lines == []
    assert bits(forgotten.params) != bits(expected.params)
    checkpoints.close()


@pytest.mark.forms(3)
@pytest.mark.parametrize("name", once_of_each(STATEFUL))
def test_run_preserves_residual_on_other_replica_numbers(name, tmp_path):
    state, _ = train(made(name), 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    before = owed(jax.device_get(state))
    other = program(OTHER[name], chosen(name), adam())
    state, _, lines = restored(checkpoints, 3, other)
    checkpoints.close()
    assert lines == [] and any(np.abs(x).max() > 1e-6 for x in jax.tree.leaves(before))
    assert_close(owed(state), before)


SETTINGS = {"microbatches": 2, "clip_norm": 0.5, "ema": 0.9, "precision": {"compute": "bfloat16", "reduce": "float32"}}


@pytest.mark.forms(3)
@pytest.mark.parametrize("name", once_of_each(OTHERS))
def test_exact_options_equal_sum_under_all_settings(name):
    if not (made := plugins.make("reducers", chosen(name))).exact_options and not made.exact:
        pytest.skip("is another mathematics than the sum")
    expected, losses = train(program(FOUR[name], "sum", adam(), **SETTINGS), 4)
    state, found = train(program(FOUR[name], lossless(name), adam(), **SETTINGS), 4)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    assert_close(state.params, expected.params, 1e-4)
    assert_close(state.ema, expected.ema, 1e-4)


@pytest.mark.forms(3)
@pytest.mark.parametrize("name", once_of_each(OTHERS))
def test_non_finite_gradient_is_seen_and_residual_unchanged(name):
    one_example = data(67)["weight"].max()

    def poisoned(params, batch, key):
        loss, metrics = loss_fn(params, batch, key)
        return loss * jax.numpy.where(batch["weight"].max() == one_example, jax.numpy.nan, 1.0), metrics

    guarded = program(FOUR[name], chosen(name), task(optax.sgd(1e-2), loss_fn=poisoned), on_nonfinite="skip", steps=6)
    state, before, skipped = guarded.init(), None, 0
    for _, batch in guarded.batches(1, 6):
        before = jax.tree.map(lambda x: x.copy(), (state.params, state.reducer))
        state, metrics = guarded.step(state, batch)
        if not np.isfinite(float(metrics["loss"])):
            skipped += 1
            assert bits((state.params, state.reducer)) == bits(before)
    assert 0 < skipped < 6
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((state.params, state.reducer)))
