"""What becomes of a reducer's state in a checkpoint: bit for bit on its own mesh, carried over to another."""

import functools

import jax
import numpy as np
import pytest

from spmdkit.checkpoint import Checkpoints
from spmdkit.program.restore import restored
from tests.communication.reducers.test_reducer_contract import STATEFUL, chosen
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.reducer_runs import adam, bits, program, residuals, train


@functools.cache
def made(name, **mesh):
    if not mesh:
        mesh = {"replica": 2, "data": 2} if name == "hierarchical" else {"data": 4}
    return program({"mesh": mesh}, chosen(name), adam(), steps=200)


@pytest.fixture
def saving(tmp_path):
    """Returns a function that saves a state as step 3."""
    checkpoints = Checkpoints(tmp_path)

    def save(state):
        checkpoints.save(3, state, {})
        checkpoints.wait()
        return checkpoints

    yield save
    checkpoints.close()


@pytest.mark.forms(1)
@pytest.mark.parametrize("name", slow_except({"int8", "hierarchical"}, STATEFUL))
def test_resume_is_bitwise_only_with_the_residual(name, saving):
    state, _ = train(made(name), 3)
    checkpoints, before = saving(state), residuals(state)
    expected, _ = train(made(name), 3, state, 4)
    state, _, lines = restored(checkpoints, 3, made(name))
    forgotten = restored(checkpoints, 3, made(name))[0]
    forgotten = forgotten.replace(reducer=jax.tree.map(lambda x: 0 * x, forgotten.reducer))
    assert lines == [] and bits(train(made(name), 3, state, 4)[0]) == bits(expected)
    assert bits(train(made(name), 3, forgotten, 4)[0].params) != bits(expected.params)
    # on another number of replicas what is owed stays owed
    inside = {"data": 2} if name == "hierarchical" else {}
    other = made(name, replica=2, **inside, tensor=2)
    state, _, lines = restored(checkpoints, 3, other)
    assert lines == [] and any(np.abs(x).max() > 1e-6 for x in jax.tree.leaves(before))
    assert_close(residuals(state), before)


def test_switching_to_compression_starts_with_empty_residual(saving):
    state, _ = train(made("sum"), 3)
    state, _, lines = restored(saving(state), 3, made("int8"))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.reducer))
    assert len(lines) == 1 and "begin at zero" in lines[0]


def test_unused_state_is_dropped_with_one_line(saving):
    state, _ = train(made("int8"), 3)
    checkpoints, params = saving(state), bits(state.params)
    for other in (made("sum"), made("int8", data=1)):
        state, _, lines = restored(checkpoints, 3, other)
        assert state.reducer == () and bits(state.params) == params
        assert len(lines) == 1 and "3 arrays" in lines[0] and "dropped" in lines[0]
