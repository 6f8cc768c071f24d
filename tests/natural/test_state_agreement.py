"""How replicas agree on model state: integers, booleans and keys are never averaged, and what has no mean is asked
for."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.forms import slow_except
from tests.support.natural_runs import (
    BATCH,
    REPLICAS,
    STEPS,
    assert_replicas_hold_the_same_bits,
    keep_gradient,
    program_of,
    train,
)

pytestmark = pytest.mark.promotes("losses as users write them: counts and a replica's index added to numbers")

DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 6)).astype(np.float32)
TOKENS = 300_000_000


def start():
    return {
        "raw": jax.random.key_data(jax.random.split(jax.random.key(7))[0]),
        "key": jax.random.key(8),
        "tokens": jnp.int32(0),
        "small": jnp.int8(100),
        "flag": jnp.array(False),
        "half": jnp.full(3, 60000.0, jnp.float16),
        "rows": jnp.int32(2**30),
        "wraps": jnp.uint8(250),
        "largest": jnp.float32(0),
        "smallest": jnp.int32(0),
        "running": jnp.zeros(6),
        "added": jnp.float32(1.5),
        "synced": jnp.float32(0),
    }


STATE_REDUCTION = {"rows|wraps|added": "sum", "largest|smallest": "max", "synced": "identical"}


def new_state(state, rows):
    return state | {
        "raw": jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state["raw"]))[0]),
        "key": jax.random.split(state["key"])[1],
        "tokens": state["tokens"] + TOKENS // STEPS,
        "flag": jnp.array(True),
        "rows": state["rows"] + rows.shape[0],
        "wraps": state["wraps"] + jnp.uint8(rows.shape[0]),
        "largest": jnp.maximum(state["largest"], jnp.abs(rows).max()),
        "smallest": jnp.minimum(state["smallest"], -2),
        "running": 0.9 * state["running"] + 0.1 * rows.mean(0),
        "added": state["added"] + (rows**2).sum(),
        "synced": jnp.maximum(state["synced"], lax.pmax(rows.max(), ("replica", "data"))),
    }


def loss_fn(params, state, rows, key):
    return sk.mean((rows @ params) ** 2), {}, new_state(state, rows)


def task(fn=loss_fn, state=start, state_reduction=STATE_REDUCTION, **changes):
    init = lambda key: sk.Variables(jnp.ones(6), state())
    return sk.Task(init, fn, keep_gradient(optax.sgd(0.1)), train_data=DATA, state_reduction=state_reduction, **changes)


@jax.jit
def expected():
    """Returns the state of one device, where the largest of all replicas is its own."""
    one = jax.vmap(jax.vmap(new_state, axis_name="data"), axis_name="replica")
    state = jax.tree.map(lambda x: x[None, None], start())
    for step in range(STEPS):
        state = one(state, jnp.asarray(DATA[step * BATCH : (step + 1) * BATCH])[None, None])
    return jax.tree.map(lambda x: x[0, 0], state)


def assert_same_state(found, right):
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].dtype == value.dtype, name
        mine, value = (jax.random.key_data(x) if name == "key" else np.asarray(x) for x in (found[name], value))
        exact = not np.issubdtype(value.dtype, np.inexact)
        np.testing.assert_allclose(mine, value, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, err_msg=name)


@pytest.mark.parametrize("mesh", slow_except(["replica 2 x data 4"], REPLICAS))
def test_every_leaf_is_that_of_one_device(mesh):
    rules = [(".*", ["mlp"])] if "tensor" in mesh else []
    program = program_of(task(rules=rules), mesh)
    state = program.init()
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
    assert_same_state(state.model_state, expected())
    assert_replicas_hold_the_same_bits({k: x for k, x in state.model_state.items() if k != "key"})


@pytest.mark.forms(1)
@pytest.mark.parametrize(("mesh", "group"), [("replica 2 x data 4", 2), ("data 8", 4), ("data 2 x fsdp 4", 1)])
def test_groups_reduce_state_separately(mesh, group):
    def eval_fn(params, state, rows):
        names = ("tokens", "half", "rows", "wraps", "largest", "running")
        shown = {name: sk.mean(state[name].astype(jnp.float32)) for name in names}
        bits = jax.random.key_data(state["key"])
        return shown | {"key": sk.mean((bits & 0xFFFF).astype(jnp.float32)), "flag": sk.mean(state["flag"])}

    own = dataclasses.replace(task(), eval_fn=eval_fn, eval_data=DATA[:BATCH])
    program = program_of(own, mesh, model_state={"group": group})
    num = program.num_replicas
    state = program.init()
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
    whole = expected()
    found = jax.device_get({name: x for name, x in state.model_state.items() if name != "key"})
    groups = num // group
    rows = DATA.reshape(STEPS, groups, -1, 6)
    assert found["tokens"].tolist() == [TOKENS] * groups
    assert found["raw"].tolist() == [whole["raw"].tolist()] * groups
    np.testing.assert_array_equal(
        jax.random.key_data(state.model_state["key"]), [jax.random.key_data(whole["key"]).tolist()] * groups
    )
    assert found["flag"].tolist() == [True] * groups and (found["half"] == 60000).all()
    assert found["rows"].tolist() == [2**30 + STEPS * BATCH // groups] * groups
    assert found["wraps"].tolist() == [(250 + STEPS * BATCH // groups) % 256] * groups
    np.testing.assert_allclose(found["largest"], np.abs(rows).max((0, 2, 3)))
    np.testing.assert_allclose(found["added"], 1.5 + (rows**2).sum((0, 2, 3)), rtol=1e-5)
    seen = program.eval(state)
    assert seen["tokens"] == TOKENS and seen["half"] == 60000 and seen["flag"] == 1
    assert seen["largest"] == pytest.approx(np.abs(DATA).max())
    assert seen["running"] == pytest.approx(found["running"].mean(), abs=1e-6)
    assert seen["key"] == (np.asarray(jax.random.key_data(whole["key"])) & 0xFFFF).mean()
    assert seen["wraps"] == sum(found["wraps"].tolist()) % 256


def refused(match, fn=loss_fn, mesh="data 8", state_reduction=STATE_REDUCTION, **settings):
    with pytest.raises(ConfigError, match=match):
        program_of(task(fn, state_reduction=state_reduction), mesh, **settings)


WITHOUT = {
    "largest": r"model state 'largest' \(float32\[\]\) by .*as a maximum.*linear in its old.*'mean'.*'max', 'sum'",
}


@pytest.mark.parametrize("mesh", ["data 2 x fsdp 4"])
@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_mean_is_refused(name, mesh):
    def loss(params, state, rows, key):
        return sk.mean((rows @ params) ** 2), {}, state | {name: new_state(state, rows)[name]}

    refused(WITHOUT[name], loss, mesh, state_reduction={})
    program_of(task(loss, state_reduction={}), "one device")  # nobody to agree with
    program_of(task(loss, state_reduction={}), mesh, model_state="replica")


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            "smallest",
            lambda x, rows, key: (rows > 0).sum(),
            r"'smallest' \(int32\[\]\) by the rows or the key.*never averaged",
        ),
        (
            "flag",
            lambda x, rows, key: rows[0, 0] > 0,
            r"'flag' \(bool\[\]\) by the rows or the key.*lax\.pmax or lax\.psum",
        ),
        (
            "key",
            lambda x, rows, key: key,
            r"'key' \(key<fry>\[\]\) by the rows or the key.*compute it from values that they share",
        ),
        (
            "synced",
            lambda x, rows, key: rows.sum(),
            r"identical for model state 'synced' .*loss_fn computes it from",
        ),
        ("synced", lambda x, rows, key: lax.pmean(rows.sum(), "replica"), "is identical for model state"),
        ("synced", lambda x, rows, key: x + lax.axis_index("data"), "is identical for model state"),
    ],
    ids=["integer", "bool", "key", "said the same", "reduced over one axis", "a replica's own index"],
)
def test_values_that_differ_are_not_identical(name, change, match):
    def loss(params, state, rows, key):
        changed = jnp.asarray(change(state[name], rows, key)) if name != "key" else change(state[name], rows, key)
        return sk.mean((rows @ params) ** 2), {}, state | {name: changed.astype(state[name].dtype)}

    refused(match, loss, state_reduction={"synced": "identical"})


def test_dependence_sees_through_loops_branches_and_jit():
    @jax.jit
    def power(u, w):
        return lax.fori_loop(0, 3, lambda _, u: jnp.tanh(w @ (w @ u)), u)

    def loss(params, state, rows, key):
        layers = jnp.ones((4, 6))
        _, means = lax.scan(lambda h, w: (h * w, (h * w).mean(0)), rows, layers)
        return (
            sk.mean((rows @ params) ** 2),
            {},
            {
                "stacked": 0.9 * state["stacked"] + 0.1 * means,
                "vector": power(state["vector"], jnp.outer(params, params)),
                "count": lax.cond(state["count"] > 3, lambda n: n, lambda n: n + 1, state["count"]),
            },
        )

    first = {"stacked": jnp.zeros((4, 6)), "vector": jnp.ones(6), "count": jnp.int32(0)}
    own = task(loss, lambda: first, state_reduction={})
    _, one = train(own, "one device")
    _, run = train(own, "data 8")
    assert run.model_state["count"] == one.model_state["count"] == 3
    for name in ("stacked", "vector"):
        np.testing.assert_allclose(run.model_state[name], one.model_state[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("agree", "match"),
    [
        (
            {"tokens": "mean"},
            r"is mean for model state 'tokens', which is int32.*never averaged\. Write sum, max or identical",
        ),
        ({"flag": "mean"}, r"which is bool.*Write identical"),
        ({"key": "sum"}, r"is sum for model state 'key', which is key<fry>\. .*for numbers only"),
        ({"token": "sum"}, r"'token' matches no leaf.*Did you mean.*tokens"),
        ({"tokens": "average"}, r"has 'average' for 'tokens'\. Valid: mean, sum, max, identical"),
    ],
)
def test_what_cannot_be_is_refused(agree, match):
    refused(match, state_reduction=agree)


def test_per_replica_value_and_grad_reduces_state_alike():
    def train_step(state, batch):
        (loss, _, new), grads = sk.value_and_grad(loss_fn)(state.params, state.model_state, batch, state.key)
        return state.apply_gradients(grads, model_state=new), {"loss": loss}

    own = dataclasses.replace(task(), train_step=train_step, view="replica")
    program = program_of(own, "replica 2 x data 4")
    state = program.init()
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
    assert_same_state(state.model_state, expected())


class Net(eqx.Module):
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, mode, key):
        self.norm = eqx.nn.BatchNorm(6, axis_name=("batch", "replica", "data"), mode=mode, momentum=0.9)
        self.out = eqx.nn.Linear(6, 1, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x)[0], state


@pytest.mark.parametrize("mode", ["ema", pytest.param("batch", marks=pytest.mark.slow)])
def test_equinox_batch_norm_equals_one_device(mode):
    model, first = eqx.nn.make_with_state(Net)(mode, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(first)

    def loss(params, state, rows, key):
        state = jax.tree.unflatten(treedef, state)
        both = jax.vmap(eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = both(rows, state)
        return sk.mean((out - rows[:, 0]) ** 2), {}, jax.tree.leaves(state)

    own = sk.Task(lambda key: sk.Variables(params, leaves), loss, keep_gradient(optax.sgd(0.1)), train_data=DATA)
    _, one = train(own)
    _, run = train(own, "data 2 x fsdp 4")
    np.testing.assert_allclose(run.losses, one.losses, rtol=1e-5)
    for mine, right in zip(run.model_state, one.model_state, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)
