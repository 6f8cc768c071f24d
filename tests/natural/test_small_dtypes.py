"""Leaves of int4, uint4, float8 and float4 in the parameters (a quantized base with LoRA), in the optimizer's state and
in the model state: each run equals that with the same numbers in float32 on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.program.replica_check import Copies
from tests.support import small_runs
from tests.support.natural_runs import assert_same_run, keep_gradient, program_of, train

DTYPES = ["int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
MESHES = {"one": {}, "data 4": {"data": 4}, "fsdp 4": {"fsdp": 4}, "data 2 x fsdp 2": {"data": 2, "fsdp": 2}}
random = np.random.default_rng(0)
X = random.normal(size=(64, 8)).astype(np.float32)
DATA = {"x": X, "y": (X @ random.normal(size=(8, 4))).astype(np.float32)}
BASE = random.integers(0, 3, (8, 4)).astype(np.float32)


LORA = {"a": random.normal(size=(8, 2)).astype(np.float32) * 0.1, "b": np.ones((2, 4), np.float32)}


def init(dtype):
    """Returns the `init` of a task, with the same numbers in any dtype."""
    base = lambda: jnp.asarray(BASE).astype(dtype)
    state = lambda: {name: base() for name in ("same", "turned", "mean", "largest")}
    return lambda key: sk.Variables({"base": base(), **jax.tree.map(jnp.asarray, LORA)}, state())


def loss_fn(params, state, batch, key):
    """A base with LoRA. The state is returned, or computed from itself, all rows and the rows of each replica."""
    wide, dtype = (lambda x: x.astype(jnp.float32)), state["same"].dtype
    scale = wide(params["base"]) + params["a"] @ params["b"] + 0.1 * wide(state["same"]) + 0.1 * wide(state["turned"])
    squares = ((batch["x"] @ scale - batch["y"]) ** 2).mean(-1)
    level = jnp.round(1 + jnp.tanh(sk.pmean(squares.mean()) - 8))
    state = {
        "same": state["same"],
        "turned": (2 - wide(state["turned"])).astype(dtype),
        "mean": jnp.full((8, 4), level).astype(dtype),
        "largest": jnp.full((8, 4), jnp.round(jnp.abs(batch["x"]).max().clip(0, 4))).astype(dtype),
    }
    return sk.mean(squares), {}, state


def quantized_signs(dtype):
    """Returns a momentum that is stored in a few bits: 0, 1 or 2."""

    def update(grads, state, params=None):
        new = jax.tree.map(lambda g, s: 1 + jnp.sign(g + s.astype(g.dtype) - 1), grads, state)
        return jax.tree.map(lambda n: -0.01 * (n - 1), new), jax.tree.map(lambda n: n.astype(dtype), new)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params), update
    )


def task(dtype):
    optimizer = keep_gradient(optax.chain(quantized_signs(dtype), optax.adam(0.1)))
    return sk.Task(
        init(dtype),
        loss_fn,
        optimizer,
        train_data=DATA,
        eval_data=DATA,
        frozen=["base"],
        state_reduction={"largest": "max"},
    )


@functools.cache
def in_float32():
    return train(task("float32"))[1]


def numbers(tree):
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), tree)


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_leaves_equal_float32(dtype, mesh):
    program, run = train(task(dtype), MESHES[mesh], ema=0.9, on_nonfinite="skip")
    small = [leaf.path for leaf in program.layout if str(leaf.dtype) == dtype]
    assert small[0] == "params/base" and "ema/base" in small and "opt_state/1/0/a" in small and len(small) == 8, small
    assert_same_run(run._replace(params=numbers(run.params), model_state=numbers(run.model_state)), in_float32())
    np.testing.assert_array_equal(numbers(run.params["base"]), BASE)
    state = program.init()
    copies = Copies(program)
    assert copies.differences(copies.hashes(state)) == []


def test_checkpoint_restores_small_leaves_on_another_mesh(tmp_path):
    settings = {"batch_size": 16, "data": {"shuffle": False}, "checkpoint": {"every_steps": 2}, "ema": 0.9}
    on = lambda mesh: {"devices": "cpu:4", "mesh": mesh, "layout": {"min_shard_bytes": 1}} | settings
    small_runs.train(tmp_path, task("uint4"), steps=2, **on({"fsdp": 4}))
    state = small_runs.train(tmp_path, task("uint4"), steps=3, **on({"data": 2, "fsdp": 2})).state
    for found, expected in ((state.params, in_float32().params), (state.model_state, in_float32().model_state)):
        for name, x in numbers(found).items():
            np.testing.assert_allclose(x, expected[name], rtol=1e-5, err_msg=name)
    assert state.params["base"].dtype == jnp.uint4


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_groups_do_not_average_a_quantized_base(sync):
    program = program_of(task("int4"), {"data": 2}, sync={sync: {"every": 2}}, steps=2)
    state = program.init()
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
    assert state.params["base"].dtype == jnp.int4
    np.testing.assert_array_equal(numbers(state.params["base"]), [BASE] * 2)
    assert np.isfinite(program.eval(state)["loss"])


def test_bytes_are_those_of_a_packed_program():
    program = program_of(task("int4"), {})
    (base,) = (leaf for leaf in program.layout if leaf.path == "params/base")
    assert base.num_bytes == BASE.size / 2
    num_bytes = sum(program.input_bytes.device.values())
    unread = 4 * (8 * 2 + 2 * 4) + 2 * BASE.size // 2  # the last gradient, and the two leaves that rows replace
    assert program.compiled.memory_analysis().argument_size_in_bytes == num_bytes - unread


def test_integers_are_parameters_only_if_they_are_frozen():
    trained = dataclasses.replace(task("int4"), frozen=())
    with pytest.raises(ConfigError, match=r"'base' as int4.*Task\(frozen=\['base'\]\)"):
        program_of(trained, {})


def test_two_bits_are_rejected_on_several_cpu_devices():
    train(task("int2"), {})
    with pytest.raises(ConfigError, match=r"leaf 'params/base' is int2\[8,4\] on 4 CPU devices.*int4 or int8"):
        program_of(task("int2"), {"data": 4})
