"""Every file in spmdkit/communication/sync keeps the contract of `sync.base`. A new sync is a file there and a row
here."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.program.restore import restored
from spmdkit.step import rng
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close, leaf_errors, program_of
from tests.support.forms import slow_except
from tests.support.reducer_runs import bits
from tests.support.sync_runs import group, mean_of_groups, train

OWN = "tests.support.own_sync:mean_of_groups"
ROWS = {
    "every_step": None,
    "stale": None,
    "local_sgd": {"every": 3},
    "post_local": {"start": 0, "every": 3},
    "diloco": {"every": 3, "optimizer": {"name": "sgd", "learning_rate": 1.0}},
    OWN: {"every": 3},
}
"""Sync -> options under which groups train separately for a while and then take their mean, or None where there are no
groups. A user's own is held to the same."""

DELAYED = [name for name, options in ROWS.items() if options and name != OWN]
FSDP = {"layout": {"min_shard_bytes": 1}}
MESHES = {
    "data 4": {"mesh": {"data": 4}},
    "replica 2 x data 2": {"mesh": {"replica": 2, "data": 2}},
    "replica 2 x fsdp 2 x tensor 2": {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}, **FSDP},
    "replica 2 x fsdp 4 zero 2": {"mesh": {"replica": 2, "fsdp": 4}, "layout": {"zero": 2, "min_shard_bytes": 1}},
}


def test_every_sync_has_a_row():
    assert plugins.names("syncs") == sorted(ROWS.keys() - {OWN})


def loss_fn(params, batch, key):
    noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(sk.example_keys()) if key is not None else 0.0
    h = jax.nn.tanh(sk.shard((batch["x"] + 0.1 * noise) @ params["up"], "batch", "mlp"))
    error = h @ params["down"] - batch["y"]
    return sk.mean((error**2).sum(-1), weights=batch["weight"]), {"size": sk.mean(jnp.abs(error).sum(-1))}


@functools.cache
def arrays(num):
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(num, n)).astype(np.float32) for n in (16, 8))
    return {"x": x, "y": y, "weight": random.uniform(0.5, 2, size=num).astype(np.float32)}


@functools.cache
def init():
    random = np.random.default_rng(1)
    up, down = random.normal(size=(16, 32)) / 4, random.normal(size=(32, 8)) / 6
    return {"up": up.astype(np.float32), "down": down.astype(np.float32)}


def task(optimizer, num=128, loss=loss_fn, **changes):
    data = arrays(num)
    return sk.Task(
        init=lambda key: jax.tree.map(jnp.asarray, init()),
        loss_fn=loss,
        optimizer=optimizer,
        train_data=data,
        eval_data={name: x[:50] for name, x in data.items()},
        rules=[("up", ["embed", "mlp"]), ("down", ["mlp", None])],
        **changes,
    )


def equal_weights(params, batch, key):
    return loss_fn(params, batch | {"weight": jnp.ones_like(batch["weight"])}, key)


# ---- against synchronous training, and against a loop written by hand

OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "nesterov": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "decoupled decay": optax.chain(optax.trace(0.9), optax.add_decayed_weights(1e-2), optax.scale(-0.05)),
}


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    "mesh, name, optimizer",
    [
        *itertools.product(["data 4", "replica 2 x fsdp 2 x tensor 2"], ["local_sgd"], OPTIMIZERS),
        ("data 4", "diloco", "momentum"),
    ],
)
def test_agreeing_after_every_step_is_synchronous_training(mesh, name, optimizer):
    own = task(OPTIMIZERS[optimizer], loss=equal_weights)
    state, losses = train(program_of(own, sync={name: ROWS[name] | {"every": 1}}, steps=4, **MESHES[mesh]), 4)
    expected, plain = train(program_of(own, steps=4, mesh={}), 4)
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    for number in range(jax.tree.leaves(state.params)[0].shape[0]):
        assert_close(group(state.params, number), expected.params)


def by_hand(program, groups, every, steps, optimizer, microbatches=1):
    """Returns (parameters of each group, losses over all examples): a loop over groups on one device, in plain JAX."""

    def loss(params, x, y, weight, positions, key):
        own = jax.vmap(lambda p: jax.random.fold_in(key, p))(positions)
        x = x + 0.1 * jax.vmap(lambda k: jax.random.normal(k, (16,)))(own)
        error = ((jax.nn.tanh(x @ params["up"]) @ params["down"] - y) ** 2).sum(-1)
        return (error * weight).sum() / weight.sum(), (error * weight).sum()

    @jax.jit
    def one(params, state, *rows):
        (_, total), grads = jax.value_and_grad(loss, has_aux=True)(params, *rows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, total

    params, states, losses = [init()] * groups, [optimizer.init(init())] * groups, []
    for step, batch in program.batches(1, steps):
        x, y, weight = (np.asarray(batch.examples[name]) for name in ("x", "y", "weight"))
        num = len(x) // groups
        shards = program.batch_shards
        shape = (shards, microbatches, len(x) // (shards * microbatches))
        s, m, r = np.unravel_index(np.arange(len(x)), shape)
        places = ((m * shards + s) * shape[2] + r).astype(np.int32)
        root = jax.random.key(program.config.seed)
        key = jax.random.fold_in(jax.random.fold_in(root, rng.STEPS), step - 1)
        base = jax.random.fold_in(jax.random.fold_in(key, rng.EXAMPLES), 0)
        total = 0.0
        for g in range(groups):
            own = slice(g * num, (g + 1) * num)
            params[g], states[g], part = one(params[g], states[g], x[own], y[own], weight[own], places[own], base)
            total += float(part)
        losses.append(total / weight.sum())
        if step % every == 0:
            mean = jax.tree.map(lambda *leaves: sum(leaves) / groups, *params)
            params = [mean] * groups
    return params, losses


@pytest.mark.forms(2)
@pytest.mark.parametrize(
    "name, mesh, microbatches",
    [
        *itertools.product(DELAYED, ["data 4"], [1, 2]),
        *itertools.product(DELAYED, ["replica 2 x data 2", "replica 2 x fsdp 4 zero 2"], [1]),
        *itertools.product(DELAYED, ["replica 2 x fsdp 2 x tensor 2"], [2]),
        (OWN, "data 4", 1),
    ],
)
def test_groups_equal_a_manual_loop(name, mesh, microbatches):
    check_by_hand(name, mesh, microbatches)


def check_by_hand(name, mesh, microbatches=1):
    """Fails unless groups are those of a plain loop that takes their mean: with Adam, weighted means, random numbers of
    each example, and microbatches."""
    adam = optax.adam(3e-3, eps=1e-3)
    sync = {name: ROWS.get(name, {"every": 3})}
    made = program_of(task(adam), sync=sync, steps=8, microbatches=microbatches, **MESHES[mesh])
    state, losses = train(made, 8)
    expected, theirs = by_hand(made, made.groups.num, 3, 8, adam, microbatches)
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    for number, params in enumerate(expected):
        assert_close(group(state.params, number), params)
    apart = max(leaf_errors(group(state.params, 0), group(state.params, 1)).values())
    assert apart > 1e-4, "between agreements groups differ"


# ---- on the wire


@pytest.mark.forms(2)
@pytest.mark.parametrize("name, mesh", [*itertools.product(DELAYED, MESHES), (OWN, "data 4")])
def test_step_sends_nothing_between_groups(name, mesh):
    check_wire(name, mesh)


def check_wire(name, mesh):
    """Fails unless a step sends nothing over the sync's axes, and what its agreements send there are all_reduces, none
    in a loop."""
    made = program_of(task(optax.adam(1e-3)), sync={name: ROWS.get(name, {"every": 3})}, **MESHES[mesh])
    axes = set(made.groups.axes)
    assert not [c for c in collectives(made.compiled.as_text(), made.sizes) if c.axes & axes]
    for agreement in [phase.compiled for phase in made.phases if not phase.in_place]:
        between = [c for c in collectives(agreement.as_text(), made.sizes) if c.axes & axes]
        assert {c.kind for c in between} == {"all-reduce"}, f"an agreement sends {sorted({c.kind for c in between})}"
        assert not any(c.in_loop for c in between), "an agreement sends in a loop"


BROKEN = {
    "of_the_first": (check_by_hand, "relative errors|Not equal"),
    "too_late": (check_by_hand, "relative errors|Not equal"),
    "median": (check_wire, "an agreement sends .*all-to-all"),
    "row_by_row": (check_wire, "an agreement sends in a loop"),
}
"""Sync of support/own_sync.py -> what finds it out, and what that says."""


@pytest.mark.parametrize("name", slow_except({"of_the_first", "row_by_row"}, BROKEN))
def test_a_broken_sync_fails_the_contract(name):
    check, said = BROKEN[name]
    with pytest.raises(AssertionError, match=said):
        check(f"tests.support.own_sync:{name}", "data 4")


def test_user_sum_over_groups_is_rejected():
    def crossing(params, batch, key):
        return sk.mean((batch["x"] @ params["up"]).sum(-1) - jax.lax.pmean(batch["x"].mean(), "data"))

    with pytest.raises(ConfigError, match="psum over data"):
        program_of(task(optax.sgd(0.1), loss=crossing), sync={"local_sgd": {"every": 2}}, mesh={"data": 4})


# ---- evaluated, saved, restored


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns (checkpoints that hold step 4 in the middle of a round, the state of step 4 on the host, the bits of
    step 8)."""
    state, _ = train(middle(), 4)
    checkpoints = Checkpoints(tmp_path_factory.mktemp("groups"))
    checkpoints.save(4, state, {})
    checkpoints.wait()
    yield checkpoints, jax.device_get(state), bits(train(middle(), 4, state, 5)[0])
    checkpoints.close()


@functools.cache
def middle(data=4, every=3, **mesh):
    return program_of(
        task(optax.adam(3e-3)), sync={"local_sgd": {"every": every}}, steps=20, mesh={"data": data, **mesh}
    )


def test_resume_is_bitwise_within_a_round(saved):
    checkpoints, _, expected = saved
    state, *_ = restored(checkpoints, 4, middle())
    assert bits(train(middle(), 4, state, 5)[0]) == expected


def test_the_mean_of_the_groups_is_evaluated():
    made = middle()
    state, _ = train(made, 4)
    mean = mean_of_groups(state.params)
    plain = program_of(task(optax.adam(3e-3)), mesh={})
    expected = plain.eval(plain.init().replace(params=jax.tree.map(jnp.asarray, mean)))
    found = made.eval(state)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


@pytest.mark.parametrize(
    "mesh", slow_except([{"replica": 2, "data": 1, "tensor": 2}], [{"replica": 2, "data": 1, "tensor": 2}, {"data": 8}])
)
def test_another_number_of_groups_begins_with_the_mean(saved, mesh):
    checkpoints, at_4, _ = saved
    other = middle(**mesh)
    state, _, lines = restored(checkpoints, 4, other)
    assert len(lines) == 1 and "groups" in lines[0]
    mean = mean_of_groups(at_4.params)
    for number in range(other.groups.num):
        assert_close(group(state.params, number), mean)
    train(other, 2, state, 5)


def test_groups_go_on_as_synchronous_training_and_back(saved, tmp_path):
    checkpoints, at_4, _ = saved
    plain = program_of(task(optax.adam(3e-3)), steps=20, mesh={"data": 4})
    state, _, lines = restored(checkpoints, 4, plain)
    assert len(lines) == 1 and "groups" in lines[0]
    assert_close(state.params, mean_of_groups(at_4.params))
    state, _ = train(plain, 2, state, 5)
    later = Checkpoints(tmp_path / "plain")
    later.save(6, state, {})
    later.close()
    params = jax.device_get(state.params)
    state, _, lines = restored(Checkpoints(tmp_path / "plain"), 6, middle())
    for number in range(4):
        assert_close(group(state.params, number), params)


# ---- refused


@pytest.mark.parametrize(
    "settings, changes, parts",
    [
        ({"mesh": {"fsdp": 4}}, {}, ("no effect", "replica: 2")),
        ({"mesh": {"data": 4}}, {"view": "replica"}, ("view='replica'", "global view")),
        ({"mesh": {"data": 4}, "checkpoint": {"every_steps": 4}}, {}, ("every_steps is 4", "every_steps: 3")),
        ({"mesh": {"data": 4}, "reducer": "bfloat16"}, {}, ("reducer: bfloat16", "no effect")),
        ({"mesh": {"replica": 2, "data": 2}, "reducer": "bfloat16"}, {}, ("bfloat16", "has a state", "error_feedback")),
    ],
)
def test_what_groups_cannot_do_is_refused(settings, changes, parts):
    own = task(optax.sgd(0.1))
    if changes:
        step = lambda state, batch: (state, {})
        own = dataclasses.replace(own, loss_fn=None, train_step=step, eval_data=None, **changes)
    with pytest.raises(ConfigError) as error:
        program_of(own, sync={"local_sgd": {"every": 3}}, **settings)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_every_is_a_whole_number_of_steps(every):
    with pytest.raises(ConfigError, match="every"):
        sk.Config(task="t.py:t", sync={"local_sgd": {"every": every}})


# ---- planned


def test_plan_names_phase_and_period_of_collectives():
    from spmdkit.plan.document import plan_program
    from spmdkit.plan.machine.target import target_of

    made = program_of(task(optax.sgd(0.1)), sync={"local_sgd": {"every": 3}}, mesh={"replica": 2, "data": 2})
    rows = plan_program(made, target_of(jax.devices()[:4]))["collectives"]
    found = {(row["phase"], row["every"], tuple(row["axes"]), row["cause"]) for row in rows if row["bytes"] > 64}
    assert found == {
        ("step", 1, ("data",), "gradient reduction"),
        ("agreement", 3, ("replica",), "agreement of groups"),
    }
    values = 16 * 32 + 32 * 8
    assert sum(row["bytes"] for row in rows if row["phase"] == "agreement") == 2 * (2 - 1) / 2 * 4 * values
