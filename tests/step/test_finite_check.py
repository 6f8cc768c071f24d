"""The guard inside a step: what it sees on every mesh, and what a skipped step leaves."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.foundation.trees import named_leaves
from spmdkit.step import finite_check
from tests.support import core_runs
from tests.support.core_models import keep_gradient, regression, regression_data, regression_loss
from tests.support.core_runs import program_of

BATCH = 32
MESHES = {
    "data 4, bfloat16, microbatches": {"mesh": {"data": 4}, "reducer": "bfloat16", "microbatches": 2, "ema": 0.9},
    "replica 2 x data 2": {"mesh": {"replica": 2, "data": 2}},
    **{name: core_runs.MESHES[name] for name in ("fsdp 8 zero 2", "fsdp 8 zero 3", "data 2 x fsdp 2 x tensor 2")},
}


@functools.cache
def linear():
    return regression(num_eval=0)


def batch_of(seed, *, bad_row=None, value=np.nan, key="x"):
    """Returns a batch on the host; one number of one row of `key` may not be finite."""
    batch = regression_data(BATCH, seed)
    if bad_row is not None:
        batch[key] = batch[key].copy()
        batch[key].reshape(BATCH, -1)[bad_row, 0] = value
    return batch


def host(state):
    return {path: np.array(jax.device_get(x)) for path, x in named_leaves(state)}


def bits_of(program):
    return int(np.bitwise_or.reduce(np.ravel(jax.device_get(program.checks.code))))


def stepped(program, *batches):
    """Returns (the states after each batch on the host, the code of each step)."""
    state, states, codes = program.init(), [], []
    for batch in batches:
        state, _ = program.step(state, batch)
        states.append(host(state))
        codes.append(bits_of(program))
    return states, codes


def bounded_loss(params, batch, key):
    return sk.mean(jnp.tanh(batch["x"] @ params["w"]).sum(-1))


def changed(before, after):
    return [path for path in before if not np.array_equal(before[path], after[path], equal_nan=True)]


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_skipped_step_changes_only_the_step_number(mesh):
    program = program_of(linear(), on_nonfinite="skip", **MESHES[mesh])
    states, codes = stepped(program, batch_of(1), batch_of(2, bad_row=29), batch_of(3))
    assert codes == [0, finite_check.LOSS | finite_check.GRADIENT | finite_check.METRICS, 0]
    assert changed(states[0], states[1]) == ["step"] and states[1]["step"] == 2
    assert set(changed(states[1], states[2])) >= {"step", "params/w", "params/b"}
    assert all(np.isfinite(x).all() for x in states[2].values())


@pytest.mark.parametrize(
    ("mesh", "value"), [("replica 2 x data 2", np.nan), ("data 2 x fsdp 2 x tensor 2", np.inf)], ids=str
)
def test_non_finite_gradients_are_seen_by_default(mesh, value):
    """The gradient alone: the loss is bounded."""
    program = program_of(dataclasses.replace(linear(), loss_fn=bounded_loss), **MESHES[mesh])
    _, codes = stepped(program, batch_of(1), batch_of(2, bad_row=29, value=value))
    assert codes[0] == 0 and codes[1] & finite_check.GRADIENT


def test_all_devices_skip_if_one_is_non_finite():
    """tanh of infinity is one and its slope zero: the loss is finite, and of the gradient only the row of that feature
    is not."""
    task = dataclasses.replace(linear(), loss_fn=bounded_loss)
    program = program_of(task, on_nonfinite="skip", **MESHES["fsdp 8 zero 3"])
    states, codes = stepped(program, batch_of(1), batch_of(2, bad_row=29, value=np.inf))
    assert codes == [0, finite_check.GRADIENT] and changed(states[0], states[1]) == ["step"]


def test_a_per_replica_step_is_guarded_too():
    def step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss, **metrics}

    task = dataclasses.replace(linear(), train_step=step, view="replica", rules=())
    for policy in ("skip", "stop"):
        program = program_of(task, mesh={"data": 4}, on_nonfinite=policy)
        states, codes = stepped(program, batch_of(1), batch_of(2, bad_row=29))
        assert codes == [0, 7]
        assert (changed(states[0], states[1]) == ["step"]) == (policy == "skip")


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh", [{"data": 2}, {"replica": 2, "fsdp": 2}], ids=str)
def test_only_the_group_with_bad_rows_skips(mesh):
    program = program_of(linear(), mesh=mesh, sync={"local_sgd": {"every": 8}}, on_nonfinite="skip")
    states, codes = stepped(program, batch_of(1), batch_of(2, bad_row=29))
    assert codes == [0, 7]
    first, second = (states[i]["params/w"] for i in (0, 1))
    np.testing.assert_array_equal(first[1], second[1])
    assert not np.array_equal(first[0], second[0]) and np.isfinite(second).all()


def test_gradient_inside_user_loop_is_checked_by_parameters():
    def step(state, batch):
        (loss, _), grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
        new = jax.lax.cond(
            loss < 1e30, lambda s, g: s.apply_gradients(g), lambda s, g: s.apply_gradients(g), state, grads
        )
        return new, {"loss": jnp.zeros(())}

    program = program_of(dataclasses.replace(linear(), train_step=step), mesh={"data": 2}, on_nonfinite="skip")
    states, codes = stepped(program, batch_of(1), batch_of(2, bad_row=29))
    assert codes == [0, finite_check.GRADIENT] and changed(states[0], states[1]) == ["step"]
    assert program.gradient_norm() is None


# ---- equal to a schedule, and to a loop by hand


def forced_step(state, batch):
    """The default step, whose reported loss is not finite where the data say so."""
    (loss, metrics), grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
    return state.apply_gradients(grads), {"loss": loss + 0 * batch["force"].sum(), **metrics}


def test_bad_row_equals_forced_skip_bitwise():
    optimizer = optax.adam(0.01)
    task = dataclasses.replace(linear(), train_step=forced_step, optimizer=keep_gradient(optimizer))
    task = dataclasses.replace(
        task, train_data=task.train_data | {"force": np.zeros(len(task.train_data["x"]), np.float32)}
    )
    program = program_of(task, on_nonfinite="skip", ema=0.9, **MESHES["replica 2 x data 2"])
    clean = [batch_of(seed) | {"force": np.zeros(BATCH, np.float32)} for seed in range(5)]
    force = np.where(np.arange(BATCH) == 20, np.nan, 0).astype(np.float32)
    bad_row = batch_of(2, bad_row=29) | {"force": clean[2]["force"]}
    by_row, codes = stepped(program, *clean[:2], bad_row, *clean[3:])
    by_flag, forced = stepped(program, *clean[:2], clean[2] | {"force": force}, *clean[3:])
    assert codes == [0, 0, 7, 0, 0] and forced == [0, 0, finite_check.LOSS, 0, 0]
    assert changed(by_row[-1], by_flag[-1]) == []

    @jax.jit
    def by_hand(params, kept, ema, batch):
        grads = jax.grad(lambda p: regression_loss(p, batch, None)[0].value)(params)
        updates, kept = optimizer.update(grads, kept, params)
        params = optax.apply_updates(params, updates)
        return params, kept, jax.tree.map(lambda e, p: 0.9 * e + (1 - 0.9) * p, ema, params)

    params = {"w": jnp.full((16, 8), 0.1), "b": jnp.zeros(8)}
    ema, kept = params, optimizer.init(params)
    for batch in (clean[0], clean[1], clean[3], clean[4]):
        params, kept, ema = by_hand(params, kept, ema, batch)
    for name in params:
        np.testing.assert_allclose(by_row[-1][f"params/{name}"], params[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(by_row[-1][f"ema/{name}"], ema[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", None])
def test_single_non_finite_value_is_found_in_arrays(platform):
    """On CPU parts are added, and the rest is added separately."""
    squares = jax.jit(functools.partial(finite_check.sum_of_squares, platform=platform))
    for shape in ((1009, 37), (3, 3, 7, 131), (40_009,), (16_385, 1), (7, 64), (5,), ()):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(squares(x), np.sum(np.float64(x) ** 2), rtol=1e-6)
        x = np.full(shape, 3e38, np.float32)  # its square is not a float32
        assert np.isfinite(squares(x))
        steps = range(1, x.size, max(1, x.size // 8 - 1)) if platform == "cpu" else ()
        for value in (np.nan, np.inf, -np.inf):
            for place in {0, x.size // 3, x.size - 1, *steps}:
                x.reshape(-1)[place] = value
                assert np.isnan(squares(x)), (shape, value, place)
                x.reshape(-1)[place] = 1
    assert squares(np.ones((0, 3), np.float32)) == 0 and squares(np.ones(3, np.int32)) == 0
    assert squares(np.full(3, 1 + 2j, np.complex64)) == 15


@pytest.mark.forms(9)
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.5}, {"on_nonfinite": "skip"}], ids=str)
@pytest.mark.parametrize("mesh", [{}, *MESHES], ids=str)
def test_gradient_norm_is_that_of_one_device(mesh, settings):
    placed = MESHES[mesh] if mesh else {}
    program = program_of(linear(), batch_size=BATCH, **placed, **settings)
    state = program.init()
    for seed in (0, 1):
        expected = norm_of_rows(jax.device_get(state.params), batch_of(seed))
        state, _ = program.step(state, batch_of(seed))
        np.testing.assert_allclose(program.gradient_norm(), expected, rtol=1e-2 if "reducer" in placed else 1e-5)


@jax.jit
def norm_of_rows(params, batch):
    return optax.tree.norm(jax.grad(lambda p: regression_loss(p, batch, None)[0].value)(params))


@pytest.mark.parametrize("mesh", [{"data": 2}, {"replica": 2, "fsdp": 2}], ids=str)
def test_gradient_norm_of_groups_is_their_mean(mesh):
    program = program_of(linear(), mesh=mesh, batch_size=BATCH, sync={"local_sgd": {"every": 8}})
    state, batch = program.init(), batch_of(1)
    params = jax.tree.map(lambda x: x[0], jax.device_get(state.params))
    program.step(state, batch)
    halves = [jax.tree.map(lambda x, i=i: np.split(x, 2)[i], batch) for i in range(2)]
    expected = np.mean([norm_of_rows(params, half) for half in halves])
    np.testing.assert_allclose(program.gradient_norm(), expected, rtol=1e-5)


def test_gradient_norm_of_a_per_replica_step():
    def step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss, **metrics}

    task = dataclasses.replace(linear(), train_step=step, view="replica", rules=())
    program = program_of(task, mesh={"data": 4}, batch_size=BATCH)
    state = program.init()
    expected = norm_of_rows(jax.device_get(state.params), batch_of(1))
    program.step(state, batch_of(1))
    np.testing.assert_allclose(program.gradient_norm(), expected, rtol=1e-5)


def test_gradient_norm_leaves_out_overwritten_leaves():
    @jax.custom_vjp
    def scaled(x, history):
        return x

    scaled.defvjp(lambda x, history: (x, None), lambda _, g: (g, jnp.float32(1000)))
    loss = lambda params, batch, key: sk.mean(scaled(batch["x"] @ params["w"], params["history"]).sum(-1))
    init = lambda key: {"w": jnp.ones((16, 8)), "history": jnp.float32(1)}
    data = regression_data(64, 0)
    task = sk.Task(init, loss, optax.sgd(0.1), train_data=data, overwritten=["history"])
    program = program_of(task, mesh={"data": 2}, batch_size=BATCH)
    program.step(program.init(), batch_of(1))
    expected = np.sqrt(8) * np.linalg.norm(batch_of(1)["x"].mean(0))
    np.testing.assert_allclose(program.gradient_norm(), expected, rtol=1e-5)
