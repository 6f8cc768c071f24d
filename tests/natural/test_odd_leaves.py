"""Leaves that are no plain float32: empty, half precision, complex, of no bytes. Carried rightly on every mesh, or
refused at the start."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.plan.compiled_step import read_program
from tests.support import small_runs
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, MESHES, STEPS, keep_gradient, leaf_errors, program_of, train

DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 8)).astype(np.float32)


def init(key):
    params = {
        "w": normal(0, 8, 4) / 3,
        "none": jnp.zeros((0, 3)),
        "nothing": jnp.zeros((4, 0)),
        "half": jnp.full(4, 0.1, jnp.float16),
    }
    state = {
        "spectrum": jnp.zeros(8, jnp.complex64),
        "half": jnp.zeros(4, jnp.float16),
        "none": jnp.zeros((0, 2), jnp.int32),
    }
    return sk.Variables(params, state)


def losses_of(params, rows):
    hidden = jnp.tanh(rows @ params["w"]) + params["half"] + params["nothing"].sum(-1)
    return (hidden**2).sum(-1) + params["none"].sum()


def new_state(state, params, rows):
    half = (0.5 * state["half"].astype(jnp.float32) + 0.5 * (rows @ params["w"]).mean(0)).astype(jnp.float16)
    return {"spectrum": 0.5 * state["spectrum"] + 0.5 * jnp.fft.fft(rows).mean(0), "half": half, "none": state["none"]}


def loss_fn(params, state, rows, key):
    return sk.mean(losses_of(params, rows)), {}, new_state(state, params, rows)


@jax.jit
def by_hand():
    params, state = init(jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    for step in range(STEPS):
        rows = DATA[step * BATCH : (step + 1) * BATCH]
        grads = jax.grad(lambda p: losses_of(p, rows).mean())(params)  # noqa: B023 - used at once
        state = new_state(state, params, rows)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params, state


@pytest.mark.parametrize("mesh", slow_except(["data 8"], ["one device", "data 8", "data 2 x fsdp 4"]))
def test_they_are_those_of_one_device(mesh):
    program, run = train(sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=DATA), mesh)
    params, state = jax.device_get(by_hand())
    assert max(leaf_errors(run.params, params).values()) < 1e-5
    np.testing.assert_allclose(run.model_state["spectrum"], state["spectrum"], atol=1e-5)
    np.testing.assert_allclose(run.model_state["half"], state["half"], atol=2e-3)  # of 11 bits
    assert run.model_state["half"].dtype == np.float16 and run.model_state["spectrum"].dtype == np.complex64
    assert run.params["none"].shape == (0, 3) and run.model_state["none"].shape == (0, 2)
    assert any("half (float16)" in note and "float32" in note for note in program.notes)
    read_program(program)  # a plan of them is no error


def test_a_leaf_of_the_batch_without_elements():
    """Sharded into microbatches and replicas as every other leaf."""
    loss = lambda params, batch, key: sk.mean((jnp.tanh(batch["rows"] @ params["w"]) ** 2).sum(-1))
    data = {"rows": DATA, "none": np.zeros((len(DATA), 0), np.float32), "never": np.zeros((len(DATA), 2, 0), np.int32)}
    task = sk.Task(lambda key: {"w": init(key).params["w"]}, loss, optax.sgd(0.1), train_data=data)
    runs = [train(task, mesh, microbatches=m)[1].params["w"] for mesh, m in (("one device", 1), ("data 2 x fsdp 4", 2))]
    np.testing.assert_allclose(*runs, atol=1e-6)


@pytest.mark.slow
def test_they_are_saved_and_restored_on_another_mesh(tmp_path):
    task = sk.Task(init, loss_fn, optax.sgd(0.1), train_data=DATA)
    for steps, mesh in ((1, "data 2 x fsdp 4"), (STEPS, "data 8")):
        changes = {"steps": steps, "mesh": MESHES[mesh]["mesh"], "batch_size": BATCH, "data": {"shuffle": False}}
        state = small_runs.train(tmp_path, task, devices="cpu:8", checkpoint={"every_steps": 1}, **changes).state
    params, expected = jax.device_get(by_hand())
    assert max(leaf_errors(jax.device_get(state.params), params).values()) < 1e-5
    np.testing.assert_allclose(state.model_state["spectrum"], expected["spectrum"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data 2 x fsdp 4", "fsdp 8 zero 2"])
def test_resume_is_bitwise_with_sharded_odd_leaves(tmp_path, mesh):
    task = sk.Task(init, loss_fn, optax.adam(0.1), train_data=DATA)
    layout = {"min_shard_bytes": 1} | MESHES[mesh].get("layout", {})
    settings = {"mesh": MESHES[mesh]["mesh"], "layout": layout, "batch_size": BATCH, "checkpoint": {"every_steps": 1}}

    def run(name, steps):
        state = small_runs.train(tmp_path / name, task, devices="cpu:8", steps=steps, **settings).state
        return {path: (x.dtype, x.tobytes()) for path, x in named_leaves(jax.device_get(state))}

    whole = run("whole", STEPS)
    run("stopped", 1)
    assert run("stopped", STEPS) == whole
    assert [event["step"] for event in small_runs.events(tmp_path / "stopped", "restored")] == [1]
    assert {"params/none", "params/half", "model_state/spectrum", "model_state/half"} <= whole.keys()


REFUSED = {
    "complex": (
        {"A": jnp.zeros(3, jnp.complex64)},
        None,
        r"parameter 'A' as complex64.*real.*jax.lax.complex\(A\['re'\]",
    ),
    "complex128": ({"A": np.zeros(3, np.complex128)}, None, "parameter 'A' as complex128"),
    "integers": ({"n": jnp.zeros(3, jnp.int32)}, None, r"parameter 'n' as int32.*sk.Variables"),
    "float0": ({"w": jnp.zeros(3)}, {"g": np.zeros(3, jax.dtypes.float0)}, r"model state 'g' as float0.*Remove it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untrainable_leaves_are_rejected_at_the_start(name):
    params, state, said = REFUSED[name]
    made = (lambda key: params) if state is None else (lambda key: sk.Variables(params, state))
    with pytest.raises(ConfigError, match=said):
        program_of(sk.Task(made, lambda p, b, k: sk.mean(b[:, 0]), optax.sgd(0.1), train_data=DATA))


WIDE = {"rows": np.int64, "mean": np.float64, "spectrum": np.complex128}


def wide_init(key):
    """As numpy makes arrays by default: of 64 bits."""
    state = {name: np.zeros(4, dtype) for name, dtype in WIDE.items()}
    return sk.Variables({"w": np.full(8, 0.1), "b": np.float32(0)}, state)


def wide_loss(params, state, rows, key):
    return sk.mean((rows @ params["w"] + params["b"]) ** 2), {}, state


def test_what_has_64_bits_is_halved_aloud():
    task = sk.Task(wide_init, wide_loss, optax.sgd(0.1), train_data=DATA)
    program = program_of(task, "data 2 x fsdp 4")
    state = program.init()
    assert {name: x.dtype for name, x in state.model_state.items()} == {
        "rows": "int32",
        "mean": "float32",
        "spectrum": "complex64",
    }
    [of_params, of_state] = [note for note in program.notes if "init" in note]
    assert of_params.endswith("another dtype: w (float64).")
    assert of_state.endswith("JAX_ENABLE_X64=1 is set: mean (float64); rows (int64); spectrum (complex128).")


def test_x64_state_needs_no_note():
    with jax.enable_x64(True):
        program = program_of(sk.Task(wide_init, wide_loss, optax.sgd(0.1), train_data=DATA))
        assert {name: x.dtype for name, x in program.init().model_state.items()} == WIDE
        assert [note for note in program.notes if "JAX_ENABLE_X64" in note] == []


def test_integer_beyond_32_bits_is_rejected():
    init = lambda key: sk.Variables({"w": np.zeros(8, np.float32)}, {"seen": np.full(2, 2**40)})
    with pytest.raises(ConfigError, match=r"'state/seen' that init returned is int64.*1099511627776.*JAX_ENABLE_X64=1"):
        program_of(sk.Task(init, wide_loss, optax.sgd(0.1), train_data=DATA))
