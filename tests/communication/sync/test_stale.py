"""`sync: stale`: each gradient is applied k steps late, as in a loop written by hand; a run goes on bit for bit, and
from and to other syncs."""

import functools

import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import ConfigError
from spmdkit.program.restore import restored
from spmdkit.testing import bill_of
from tests.support.core_runs import assert_close, program_of
from tests.support.forms import slow_except
from tests.support.messages import assert_parts, raises
from tests.support.reducer_runs import bits, loss_fn, task
from tests.support.sync_runs import adam, loss_by_hand, program, train

STEPS = 6
MESHES = {
    "data 4": {"mesh": {"data": 4}, "microbatches": 2},
    "data 2 x fsdp 2 zero 2": {"mesh": {"data": 2, "fsdp": 2}, "layout": {"zero": 2}},
    "fsdp 2 x tensor 2": {"mesh": {"fsdp": 2, "tensor": 2}},
}


def late(k, optimizer=None, mesh=None, **settings):
    return program("every_step" if k is None else {"stale": k}, mesh or {"data": 4}, optimizer, **settings)


@functools.cache
def on_data(k):
    return late(k, clip_norm=1.0)


def by_hand(made, k, steps):
    """Returns (parameters, losses): plain JAX on one device, with a list of gradients that wait."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam())
    value_and_grad = jax.jit(jax.value_and_grad(loss_by_hand))

    @jax.jit
    def updated(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_get(made.init().params)
    state, waiting, losses = optimizer.init(params), [], []
    for _, batch in made.batches(1, steps):
        value, gradient = value_and_grad(params, jax.device_get(batch.examples))
        losses.append(float(value))
        waiting.append(gradient)
        if len(waiting) > k:
            params, state = updated(params, state, waiting.pop(0))
    return params, losses


@pytest.mark.parametrize("mesh", slow_except({"data 2 x fsdp 2 zero 2"}, MESHES))
def test_gradient_is_applied_k_steps_late(mesh):
    made = late(2, clip_norm=1.0, **MESHES[mesh])
    state, losses = train(made, STEPS)
    params, expected = by_hand(made, 2, STEPS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(jax.device_get(state.params), params)
    assert_close(jax.device_get(train(made, 2)[0].params), jax.device_get(made.init().params), 0)  # two wait


def test_k_0_is_bitwise_synchronous_training():
    assert bits(train(on_data(0), 3)[0]) == bits(train(on_data(None), 3)[0])
    plain, late = ([(c.op, c.axes, c.bytes) for c in bill_of(on_data(k)).collectives] for k in (None, 2))
    assert plain == late and len(plain) > 0


@pytest.mark.slow
def test_converges_only_for_small_learning_rates():
    """A curve: 40 steps of plain descent. What a delay of 4 steps costs is small at a rate far from the edge of
    stability; nearer, it diverges."""
    last = lambda k, rate: np.mean(train(late(k, optax.sgd(rate)), 40)[1][-4:])
    first = train(on_data(None), 1)[1][0]
    assert last(0, 0.02) < last(4, 0.02) < 1.25 * last(0, 0.02) < 0.1 * first
    assert last(0, 0.08) < 0.1 * first < 10 * first < last(4, 0.08)


def test_pending_gradients_are_sharded_and_explained():
    made = late(2, mesh={"data": 2, "fsdp": 2}, layout={"min_shard_bytes": 1})
    spec = {leaf.path: leaf.spec for leaf in made.layout}
    assert spec["opt_state/delay_line/1/up"] == spec["params/up"] != jax.sharding.PartitionSpec()
    assert "stale: replicas are synchronous in every step, each gradient 2 steps late" in made.explain()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    checkpoints = Checkpoints(tmp_path_factory.mktemp("stale"))
    state, _ = train(on_data(2), 3)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    at_3 = jax.device_get(state)
    yield checkpoints, at_3, bits(train(on_data(2), 3, state, 4)[0])
    checkpoints.close()


def test_a_run_goes_on_bit_for_bit(saved):
    checkpoints, _, expected = saved
    state, _, lines = restored(checkpoints, 3, on_data(2))
    assert lines == [] and bits(train(on_data(2), 3, state, 4)[0]) == expected


@pytest.mark.parametrize("k", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_other_delays_keep_optimizer_and_report_dropped_gradients(k, saved):
    checkpoints, at_3, _ = saved
    state, _, lines = restored(checkpoints, 3, on_data(k))
    assert len(lines) == 1
    assert_parts(lines[0], f"{k or 0} steps", "2 pending gradients of step 3 are dropped")
    assert bits(state.params) == bits(at_3.params)
    alone = state.opt_state if k is None else state.opt_state.optimizer
    assert bits(alone) == bits(at_3.opt_state.optimizer)
    if k:
        assert int(state.opt_state.waiting) == 0
    train(on_data(k), 2, state, 4)


def test_from_synchronous_training_the_line_begins_empty(tmp_path):
    state, _ = train(on_data(None), 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.close()
    before = jax.device_get(state)
    state, _, lines = restored(Checkpoints(tmp_path), 3, on_data(2))
    assert len(lines) == 1
    assert_parts(lines[0], "2 steps", "no pending gradients")
    assert bits(state.opt_state.optimizer) == bits(before.opt_state) and int(state.opt_state.waiting) == 0
    later, _ = train(on_data(2), 2, state, 4)
    assert bits(later.params) == bits(before.params)


@pytest.mark.parametrize("k", [-1, 1.5, True, None])
def test_k_is_a_whole_number_of_steps(k):
    with pytest.raises(ConfigError, match=r"stale.*k"):
        sk.Config(task="t.py:t", sync={"stale": {"k": k}})
    with pytest.raises(ConfigError, match="stale"):
        sk.Config(task="t.py:t", sync={"stale": k})


def test_line_search_optimizer_is_rejected():
    with raises("sync: stale", "line search", repair="sync: every_step"):
        late(2, optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4)))


def test_step_without_the_optimizer_is_rejected():
    def step(state, batch):
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.replace(params=jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)), {"loss": loss}

    with raises("sync: stale", "no effect", repair="state.apply_gradients"):
        program_of(task(adam(), num=64, loss_fn=None, train_step=step), sync={"stale": 1}, mesh={"data": 4})
