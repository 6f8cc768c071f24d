"""Which calls of sk.value_and_grad have a state of their reducer's, and which steps and meshes are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from tests.support.core_runs import assert_close
from tests.support.reducer_runs import loss_fn, program, task, train

DATA_4 = {"mesh": {"data": 4}}


def own_step(train_step, **changes):
    return task(optax.sgd(0.05), loss_fn=None, train_step=train_step, **changes)


def part_of_the_parameters(state, batch):
    of_head = lambda head, batch, key: loss_fn(state.params | head, batch, key)
    head = {name: state.params[name] for name in ("down", "bias")}
    (loss, _), grads = sk.value_and_grad(of_head)(head, batch, state.key)
    return state.apply_gradients(grads | {"up": jnp.zeros_like(state.params["up"])}), {"loss": loss}


@pytest.mark.slow
def test_call_on_some_parameters_has_its_own_state():
    mesh = {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}}
    state, losses = train(program(mesh, "bfloat16", own_step(part_of_the_parameters)), 4)
    expected, plain = train(program(mesh, "sum", own_step(part_of_the_parameters)), 4)
    np.testing.assert_allclose(losses, plain, rtol=1e-3)
    assert_close(state.params, expected.params, 0.01)
    (entry,) = state.reducer
    assert set(entry) == {"down", "bias"} and np.abs(np.asarray(entry["down"]["error"])).max() > 0


def second_of_two(state, batch):
    """Two calls at parameters that stand still; what the second gave is added up."""
    compute = sk.value_and_grad(loss_fn)
    (loss, _), _ = compute(state.params, batch, state.key)
    _, grads = compute(jax.tree.map(lambda p: 1.5 * p, state.params), batch, state.key)
    return state.apply_gradients(grads), {"loss": loss}


def test_second_call_accounts_for_its_own_sum():
    own = task(loss_fn=None, train_step=second_of_two)
    state, _ = train(program(DATA_4, "bfloat16", own), 6)
    expected, _ = train(program(DATA_4, "sum", own), 6)
    first, second = (
        {name: state.opt_state[name] + np.asarray(x["error"]).sum(0) for name, x in entry.items()}
        for entry in state.reducer
    )
    assert_close(second, expected.opt_state)
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(first, expected.opt_state)


def test_per_replica_call_has_a_state():
    def step(state, batch):
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss}

    state, _ = train(program(DATA_4, "bfloat16", own_step(step, view="replica")), 4)
    expected, _ = train(program(DATA_4, "bfloat16", own_step(step)), 4)
    assert_close(state.params, expected.params)
    assert_close(state.reducer, expected.reducer)


def in_a_scan(state, batch):
    def body(params, _):
        (loss, _), grads = sk.value_and_grad(loss_fn)(params, batch, state.key)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    params, losses = jax.lax.scan(body, state.params, None, length=2)
    return state.replace(params=params, step=state.step + 1), {"loss": losses[-1]}


def in_a_branch(state, batch):
    compute = lambda: sk.value_and_grad(loss_fn)(state.params, batch, state.key)
    (loss, _), grads = jax.lax.cond(state.step % 2 == 0, compute, compute)
    return state.apply_gradients(grads), {"loss": loss}


def in_a_jit(state, batch):
    compute = jax.jit(lambda params: sk.value_and_grad(loss_fn)(params, batch, state.key))
    (loss, _), grads = compute(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def in_a_vmap(state, batch):
    """ReduceGroup two seeds of a loss; each replica adds up once for both."""
    compute = jax.vmap(lambda scale: sk.value_and_grad(loss_fn)(scaled(state.params, scale), batch, state.key))
    (losses, _), grads = compute(SCALES)
    return state.apply_gradients(jax.tree.map(lambda g: g.sum(0), grads)), {"loss": losses.sum()}


def one_after_the_other(state, batch):
    (first, _), grads = sk.value_and_grad(loss_fn)(scaled(state.params, SCALES[0]), batch, state.key)
    (second, _), more = sk.value_and_grad(loss_fn)(scaled(state.params, SCALES[1]), batch, state.key)
    return state.apply_gradients(jax.tree.map(jnp.add, grads, more)), {"loss": first + second}


SCALES = np.float32([1.0, 0.5])


def scaled(params, scale):
    return jax.tree.map(lambda x: x * scale, params)


@pytest.mark.slow
@pytest.mark.forms(1)
@pytest.mark.parametrize("reducer", ["ordered", "sum"])
@pytest.mark.parametrize("mesh", [{"mesh": {"data": 2, "fsdp": 2}}, DATA_4], ids=["mapped", "manual"])
def test_call_inside_user_vmap_equals_single_calls(mesh, reducer):
    found, losses = train(program(mesh, reducer, own_step(in_a_vmap)), 2)
    expected, alone = train(program({"mesh": {}}, "sum", own_step(one_after_the_other)), 2)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert_close(found.params, expected.params)


@pytest.mark.forms(1)
@pytest.mark.parametrize("step", [in_a_scan, in_a_branch, in_a_jit, in_a_vmap])
def test_stateful_call_inside_control_flow_names_its_line(step):
    with pytest.raises(ConfigError) as error:
        program(DATA_4, "bfloat16", own_step(step))
    assert "sk.value_and_grad" in str(error.value) and "test_reducer_calls.py:" in str(error.value)
    assert "reducer: sum" in str(error.value)
    train(program(DATA_4, {"bfloat16": {"error_feedback": False}}, own_step(step)), 1)


def with_jax_grad(state, batch):
    grads = jax.grad(lambda params: loss_fn(params, batch, None)[0].value)(state.params)
    return state.apply_gradients(grads), {}


def with_pmean(state, batch):
    grads = sk.pmean(jax.grad(lambda params: loss_fn(params, batch, None)[0].value)(state.params))
    return state.apply_gradients(grads), {}


@pytest.mark.parametrize("step, view", [(with_jax_grad, "global"), (with_pmean, "replica")])
def test_step_without_value_and_grad_is_rejected(step, view):
    for reducer in ("bfloat16", "ordered"):
        with pytest.raises(ConfigError, match=r"never calls sk\.value_and_grad"):
            program(DATA_4, reducer, own_step(step, view=view))
    program(DATA_4, "sum", own_step(step, view=view))


@pytest.mark.parametrize(
    "mesh, repair, rules",
    [
        ({"mesh": {"fsdp": 8}}, "{replica: 2, fsdp: 4}", []),
        ({"mesh": {"tensor": 4}}, "{replica: 2, tensor: 2}", [("up", ["embed", "mlp"])]),
    ],
)
def test_mesh_without_effect_is_rejected_with_repair(mesh, repair, rules):
    own = task(optax.sgd(0.1), num=64, rules=rules)
    with pytest.raises(ConfigError) as error:
        program(mesh, "bfloat16", own)
    assert "no effect" in str(error.value) and repair in str(error.value)
    program(mesh, "sum", own)


@pytest.mark.parametrize("name", ["ordered", "hierarchical", "int8"])
def test_zero_3_over_all_devices_rejects_every_reducer(name):
    with pytest.raises(ConfigError) as error:
        program({"mesh": {"fsdp": 8}, "layout": {"zero": 3}}, name, task(num=64))
    parts = (f"reducer: {name} has no effect", "fsdp 8, zero: 3", "mesh: {replica: 2, fsdp: 4}", "reducer: sum")
    assert all(part in str(error.value) for part in parts), error.value


def test_on_one_device_nothing_is_kept():
    made = program({"mesh": {}}, "bfloat16", task(optax.sgd(0.1)))
    assert made.init().reducer == () and made.form == "plain"


@pytest.mark.parametrize(
    "choice, parts",
    [
        ("bfloat", (f"needs one of {', '.join(plugins.names('reducers'))}", "Did you mean 'bfloat16'?")),
        ({"sum": {"bits": 8}}, ("sum takes no options", "Write sum alone")),
        ({"bfloat16": {"term": 3}}, ("no option 'term'", "Did you mean 'terms'?")),
        ({"bfloat16": {"terms": 7}}, ("terms is 7", "Write terms: 1")),
    ],
)
def test_unknown_reducer_is_rejected_by_the_config(choice, parts):
    with pytest.raises(ConfigError) as error:
        sk.Config(task="t.py:t", reducer=choice)
    assert all(part in str(error.value) for part in ("reducer", *parts))
