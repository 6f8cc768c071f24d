"""Typed random keys in the state: optimizers that draw noise, model state with a key, saved and restored on another
mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.foundation.trees import describe, leaf_bytes, named_leaves, tree_bytes
from spmdkit.step.model_state.agreement import merge_groups
from tests.support.core_runs import program_of

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
SETTINGS = {"data": {"shuffle": False}, "batch_size": 16, "steps": 3}
noisy_adam = lambda: optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(3)), optax.adam(0.05))
W0 = {"w": np.linspace(-1, 1, 16, dtype=np.float32), "b": np.zeros(8, np.float32)}


def loss(p, x):
    return (jnp.tanh(x @ p["w"]) - p["b"].sum()) ** 2


def noisy(optimizer):
    return sk.Task(
        lambda key: jax.tree.map(jnp.asarray, W0),
        lambda p, b, key: sk.mean(loss(p, b)),
        optimizer,
        train_data=X,
        eval_data=X,
    )


def run(program, state=None, steps=3):
    state = program.init() if state is None else state
    for _ in range(steps):
        state, _ = program.step(state, program.put(X))
    return state


def by_hand(optimizer):
    params = jax.tree.map(jnp.asarray, W0)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(jax.grad(lambda p: loss(p, X).mean())(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def comparable(tree):
    """Returns path -> numbers on the host, of a key its data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return {p: np.asarray(jax.random.key_data(x) if is_key(x) else x) for p, x in named_leaves(tree)}


def test_noisy_optimizer_equals_plain_optax_on_meshes():
    params, opt_state = by_hand(noisy_adam())
    for mesh in ({"data": 8}, {"data": 2, "fsdp": 4}):
        program = program_of(noisy(noisy_adam()), mesh=mesh, **SETTINGS)
        state = run(program)
        assert program.non_finite_leaf(state) is None
        for found, expected in ((state.params, params), (state.opt_state, opt_state)):
            found, expected = comparable(found), comparable(expected)
            assert found.keys() == expected.keys()
            for path, x in expected.items():
                if x.dtype == np.uint32:
                    np.testing.assert_array_equal(found[path], x, err_msg=path)
                else:
                    np.testing.assert_allclose(found[path], x, rtol=1e-5, atol=1e-6, err_msg=f"{path} {mesh}")


def keys_for_each_row():
    """Returns an optimizer that keeps an array of keys, cut over fsdp like any other, and draws noise for each row from
    its own."""

    def init(params):
        return {"one": jax.random.key(3, impl="rbg"), "rows": jax.random.split(jax.random.key(4), 16)}

    def update(grads, state, params=None):
        rows = jax.vmap(lambda k: jax.random.fold_in(k, 1))(state["rows"])
        noise = jax.vmap(lambda k: jax.random.normal(k, ()))(rows)
        return {"w": -0.05 * (grads["w"] + 0.1 * noise), "b": -0.05 * grads["b"]}, {**state, "rows": rows}

    return optax.GradientTransformation(init, update)


def test_keys_restore_bitwise_on_another_mesh(tmp_path):
    settings = {**SETTINGS, "ema": 0.9, "layout": {"min_shard_bytes": 1}}
    make = lambda **more: program_of(noisy(keys_for_each_row()), **{**settings, **more})
    first = make(mesh={"fsdp": 8})
    (placement,) = [p for p in first.layout if p.path == "opt_state/rows"]
    assert placement.axes == {"fsdp"} and placement.num_bytes == 128
    state = run(first)
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert checkpoints.read_tree(3)["opt_state/rows"] == ((16,), "key<fry>")
    expected = None
    for other in (make(mesh={"data": 2, "fsdp": 4}), make(mesh={"fsdp": 8}, offload=["optimizer"])):
        restored, _ = checkpoints.restore(3, other.abstract_state)
        assert jax.tree.map(lambda x: x.dtype, restored.opt_state) == jax.tree.map(lambda x: x.dtype, state.opt_state)
        for path, x in comparable(state).items():
            np.testing.assert_array_equal(comparable(restored)[path], x, err_msg=path)
        went_on = comparable(run(other, restored, 1).params)
        expected = expected or went_on
        for path, x in expected.items():
            np.testing.assert_allclose(went_on[path], x, rtol=1e-5, atol=1e-6)
    checkpoints.close()


def test_evaluation_uses_state_of_the_first_group():
    state = {
        "key": jax.random.split(jax.random.key(0), 2),
        "n": jnp.array([2**30, 2**30 + 1]),
        "seen": jnp.array([True, False]),
    }
    state["mean"] = jnp.array([60000.0, 60000.0], jnp.float16)
    found = comparable(merge_groups({}, state))
    np.testing.assert_array_equal(found["key"], jax.random.key_data(state["key"])[0])
    assert found["n"] == 2**30 and found["seen"] and found["mean"] == 60000 and found["mean"].dtype == np.float16


@pytest.mark.parametrize("mesh", [{}, {"data": 8}], ids=str)
def test_per_replica_step_passes_keys_and_flags_on(mesh):
    def step(state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(p, batch).mean())(state.params)
        seen = sk.pmean(jnp.abs(batch).max()) > 0
        if not mesh:  # over an axis of one replica what depends on the batch need not be reduced
            seen = jnp.abs(batch).max() > 0
        new = {"seen": seen, "key": jax.random.fold_in(state.model_state["key"], jnp.where(seen, 1, 0))}
        return state.apply_gradients(sk.pmean(grads), new), {"loss": sk.pmean(value)}

    init = lambda key: sk.Variables(jax.tree.map(jnp.asarray, W0), {"seen": jnp.array(False), "key": jax.random.key(1)})
    task = sk.Task(init, train_step=step, optimizer=noisy_adam(), train_data=X, view="replica")
    state = run(program_of(task, mesh=mesh, **SETTINGS), steps=2)
    assert state.model_state["seen"].dtype == bool and bool(state.model_state["seen"])
    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 1), 1)
    np.testing.assert_array_equal(jax.random.key_data(state.model_state["key"]), jax.random.key_data(expected))


def test_verify_and_plan_take_keys_in_the_state():
    from spmdkit.plan.memory import shard_bytes
    from spmdkit.verify.task_runner import flat

    key = jax.random.split(jax.random.key(0), 3)
    assert leaf_bytes(key) == 24 and tree_bytes({"k": key, "w": jnp.ones(2)}) == 32 and describe(key) == "key<fry>[3]"
    program = program_of(noisy(keys_for_each_row()), mesh={"fsdp": 8}, layout={"min_shard_bytes": 1}, **SETTINGS)
    state = run(program, steps=1)
    found = flat(state.opt_state)
    assert found["rows"].shape == (16, 2) and found["one"].shape == (4,)
    assert {x.dtype for x in found.values()} == {np.dtype(np.uint32)}
    (rows,) = [p for p in program.layout if p.path == "opt_state/rows"]
    assert shard_bytes(rows.shape, rows.dtype, rows.sharding(program.mesh)) == 16
