"""A second step with a donated state is an error of spmdkit, where jaxlib 0.10.2 would end the process."""

import jax
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


@pytest.mark.parametrize("mesh", [{}, {"data": 4}, {"data": 2, "fsdp": 2}], ids=str)
def test_leaves_that_share_memory_are_copied(mesh):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    task = sk.Task(lambda key: jnp.ones(4), lambda w, b, key: sk.mean((b @ w) ** 2), optax.adam(0.1), x)
    layout = {"layout": {"min_shard_bytes": 1}} if "fsdp" in mesh else {}
    program = program_of(task, mesh=mesh, batch_size=8, ema=0.5, **layout)
    results = []
    for copy in (lambda w: w, jnp.copy, lambda w: jax.device_put(w, w.sharding)):
        state, _ = program.step(program.init(), program.put(x))
        state, _ = program.step(state.replace(params=copy(state.ema)), program.put(x))
        state, _ = program.step(state.replace(ema=copy(state.params)), program.put(x))
        results.append(jax.device_get(program.step(state, program.put(x))[0].params))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
