"""A second step with a donated state is an error of spmdkit, where jaxlib 0.10.2 would end the process."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.core_runs import program_of


def test_donated_state_is_rejected():
    x = np.ones((8, 4), np.float32)
    task = sk.Task(lambda key: jnp.ones(4), lambda w, b, key: sk.mean(b @ w), optax.adam(0.1), x, x)
    program = program_of(task, mesh={"data": 2}, batch_size=8)
    first = program.init()
    state, _ = program.step(first, program.put(x))
    with pytest.raises(ConfigError, match=r"program\.step: the state was donated.*state, metrics = program\.step"):
        program.step(first, program.put(x))
    with pytest.raises(ConfigError, match=r"program\.eval: the state was donated to an earlier step"):
        program.eval(first)
    state, _ = program.step(state, program.put(x))
    assert int(state.step) == 2
