"""What becomes of a reducer's state in a checkpoint: bit for bit on its own mesh, carried over to another."""

import functools

import jax
import numpy as np
import optax
import pytest

from spmdkit.checkpoint import Checkpoints
from spmdkit.program.restore import restored
from tests.support.core_runs import assert_close
from tests.support.reducer_runs import owed, program, task, train

DATA_4 = {"mesh": {"data": 4}}


@functools.cache
def adam():
    return task(optax.adam(1e-2, eps=1e-3))


@functools.cache
def made(reducer, **mesh):
    return program({"mesh": mesh}, reducer, adam())


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


@pytest.fixture
def saved(tmp_path):
    """Returns (checkpoints that hold step 4, the state of step 4 on the host, that of step 8)."""
    state, _ = train(made("bfloat16", data=4), 4)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, state, {})
    checkpoints.wait()
    at_4 = jax.device_get(state)
    state, _ = train(made("bfloat16", data=4), 4, state, 5)
    yield checkpoints, at_4, state
    checkpoints.close()


def test_resume_is_bitwise_and_needs_the_residual(saved):
    checkpoints, _, expected = saved
    state, _, lines = restored(checkpoints, 4, made("bfloat16", data=4))
    forgotten = state.replace(reducer=jax.tree.map(lambda x: 0 * x, state.reducer))
    params = jax.tree.map(lambda x: x.copy(), (state.params, state.opt_state))
    state, _ = train(made("bfloat16", data=4), 4, state, 5)
    assert bits(state) == bits(expected) and lines == []
    other = forgotten.replace(params=params[0], opt_state=params[1], step=expected.step * 0 + 4, rng=expected.rng * 1)
    other, _ = train(made("bfloat16", data=4), 4, other, 5)
    assert bits(other.params) != bits(expected.params)


@pytest.mark.forms(2)
@pytest.mark.parametrize(
    "mesh", [{"data": 2}, {"data": 8}, {"replica": 2, "data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}]
)
def test_what_is_owed_stays_owed_on_another_number_of_replicas(saved, mesh):
    checkpoints, at_4, expected = saved
    other = made("bfloat16", **mesh)
    state, _, lines = restored(checkpoints, 4, other)
    assert lines == []
    assert_close(owed(state), owed(at_4))
    replicas = {leaf["error"].shape[0] for leaf in state.reducer[0].values()}
    assert replicas == {other.num_replicas}
    state, _ = train(other, 4, state, 5)
    assert_close(state.params, expected.params, 0.02)


def test_switching_to_compression_starts_with_empty_residual(tmp_path):
    state, _ = train(made("sum", data=4), 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, {})
    checkpoints.close()
    state, _, lines = restored(Checkpoints(tmp_path), 2, made("bfloat16", data=4))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.reducer))
    assert len(lines) == 1 and "begin at zero" in lines[0]


@pytest.mark.parametrize("reducer, mesh", [("sum", {"data": 4}), ("bfloat16", {"data": 1})])
def test_unused_state_is_dropped_with_one_line(saved, reducer, mesh):
    checkpoints, at_4, _ = saved
    state, _, lines = restored(checkpoints, 4, made(reducer, **mesh))
    assert state.reducer == () and bits(state.params) == bits(at_4.params)
    assert len(lines) == 1 and "3 arrays" in lines[0] and "dropped" in lines[0]
