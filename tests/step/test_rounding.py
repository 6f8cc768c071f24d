"""Updates of bfloat16 parameters: rounded stochastically, or to nearest, with the lost part measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.step import lost_updates
from spmdkit.step.rounding import stochastic_bfloat16
from tests.support.core_hlo import collectives
from tests.support.core_runs import program_of

MESHES = {"one device": {}, "data 4": {"data": 4}, "fsdp 4": {"fsdp": 4}, "data 2 x fsdp 2": {"data": 2, "fsdp": 2}}
X = np.random.default_rng(0).integers(-2, 3, size=(16, 8)).astype(np.float32)
PLAIN = {"batch_size": 16, "data": {"shuffle": False}}


def falling(**changes):
    """Returns a task with exact gradients: those of `w`, 1, are too small for it, and those of `b` are not."""

    def loss(p, b, key):
        p = jax.tree.map(lambda x: x.astype(jnp.float32), p)
        return sk.mean((b.astype(jnp.float32) ** 2 @ p["w"] + p["b"]).sum(-1))

    init = lambda key: {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}
    return sk.Task(init, loss, optax.sgd(2.0**-13), train_data=X, **changes)


def run(rounding, mesh, steps=4, state=None, start=1, task=None, **changes):
    precision = {"params": "bfloat16", "rounding": rounding}
    program = program_of(task or falling(), mesh=mesh, precision=precision, steps=8, **PLAIN | changes)
    initial = program.init()
    leaves = jax.tree.leaves(initial if state is None else state)
    state = jax.device_put(jax.tree.unflatten(jax.tree.structure(initial), leaves), program.state_sharding)
    for _, batch in program.batches(start, steps):
        state, _ = program.step(state, batch)
    return program, state


def bits(state):
    return {name: np.asarray(x).view(np.uint16) for name, x in jax.device_get(state.params).items()}


# ---- stochastic


def test_mean_over_keys_is_the_value():
    values = np.array([1 + 2**-10, -1 - 3 * 2**-9, 3e-5, 1e30, 1.0, -0.0], np.float32)
    keys = jax.random.split(jax.random.key(0), 20_000)
    rounded = np.asarray(jax.vmap(lambda key: stochastic_bfloat16(values, key))(keys), np.float64)
    spacing = np.abs(values) * 2.0**-7
    assert (np.abs(rounded - values) < spacing + 1e-45).all() and set(rounded[:, 0]) == {1, 1 + 2**-7}
    assert (np.abs(rounded.mean(0) - values) <= 4 * spacing / 2 / np.sqrt(len(keys))).all()
    assert (rounded[:, 4] == 1).all() and np.signbit(rounded[:, 5]).all()
    odd = np.array([np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(np.asarray(stochastic_bfloat16(odd, keys[0]), np.float32), odd)


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if MESHES[mesh]])
def test_stochastic_rounding_is_bitwise_equal_on_every_mesh(mesh):
    expected = bits(run("stochastic", {})[1])
    found = bits(run("stochastic", MESHES[mesh])[1])
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    w = np.asarray(expected["w"]).view(jnp.bfloat16)
    assert 0 < (w != 1).mean() < 1 and len({tuple(column) for column in w.T}) > 1


def test_resume_draws_the_same_bits():
    _, half = run("stochastic", {"data": 4}, steps=2)
    _, resumed = run("stochastic", {"fsdp": 4}, steps=4, state=jax.device_get(half), start=3)
    for name, x in bits(run("stochastic", {})[1]).items():
        np.testing.assert_array_equal(bits(resumed)[name], x, err_msg=name)


def test_updates_of_one_step_draw_different_bits():
    def train_step(state, batch):
        first = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params))
        second = first.apply_gradients(jax.tree.map(jnp.ones_like, state.params))
        moved = lambda a, b: (a.params["w"] != b.params["w"]).astype(jnp.float32)
        both = moved(first, state) * moved(second, first)
        return second, {"first": moved(first, state).sum(), "both": both.sum()}

    task = sk.Task(lambda key: {"w": jnp.ones(4096)}, optimizer=optax.sgd(2.0**-9), train_step=train_step, train_data=X)
    program = program_of(
        task, precision={"compute": "bfloat16", "params": "bfloat16", "rounding": "stochastic"}, **PLAIN
    )
    _, metrics = program.step(program.init(), program.put(X))
    assert abs(float(metrics["first"]) / 4096 - 0.5) < 0.05 and abs(float(metrics["both"]) / 4096 - 0.25) < 0.05


def test_steps_and_leaves_draw_different_bits():
    task = lambda: sk.Task(
        lambda key: {"a": jnp.ones(4096), "b": jnp.ones(4096)},
        lambda p, b, key: sk.mean(0 * b.sum(-1) + sum(x.astype(jnp.float32).sum() for x in p.values())),
        optax.sgd(2.0**-9),
        train_data=X,
    )
    one, two = (jax.device_get(run("stochastic", {}, steps=n, task=task())[1].params) for n in (1, 2))
    moved = [one["a"] != 1, one["b"] != 1, one["a"] != two["a"]]
    for i, first in enumerate(moved):
        assert abs(first.mean() - 0.5) < 0.05
        assert all(abs((first & other).mean() - 0.25) < 0.05 for other in moved[:i])


def test_nearest_stalls_where_stochastic_converges():
    target = np.random.default_rng(1).normal(size=256).astype(np.float32)
    loss = lambda p, b, key: sk.mean(((p.astype(jnp.float32) - target) ** 2).sum() + 0 * b.sum(-1))
    task = sk.Task(lambda key: jnp.ones(256), loss, optax.sgd(2.0**-11), train_data=X)
    far = {}
    for rounding in ("nearest", "stochastic"):
        program = program_of(task, precision={"params": "bfloat16", "rounding": rounding}, **PLAIN)
        state, batch = program.init(), program.put(X)
        for _ in range(3000):
            state, _ = program.step(state, batch)
        far[rounding] = float(np.abs(np.asarray(state.params, np.float32) - target).mean())
    distance = np.abs(1 - target).mean()
    assert far["nearest"] > 0.5 * distance and far["stochastic"] < 0.06 * distance


# ---- what is rejected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": {"rounding": "stochastic"}}, "params is float32"),
        ({"precision": "bfloat16", "rounding": "stochastic"}, "rounding"),
        ({"precision": {"params": "bfloat16", "rounding": "up"}}, "nearest"),
        *(
            ({"precision": {"params": "bfloat16", "rounding": "stochastic"}, "sync": sync}, "rounded to nearest")
            for sync in ({"local_sgd": {"every": 2}}, {"parameter_server": {"servers": 1, "workers": 2}})
        ),
    ],
    ids=str,
)
def test_ineffective_rounding_is_rejected(changes, words):
    with pytest.raises(ConfigError, match=words):
        sk.Config(task="t.py:t", **changes)


def test_rounding_without_apply_gradients_is_rejected():
    step = lambda state, batch: (state.replace(params=jax.tree.map(lambda x: x * 2, state.params)), {})
    task = sk.Task(lambda key: {"w": jnp.ones(4)}, optimizer=optax.sgd(1.0), train_step=step, train_data=X)
    with pytest.raises(ConfigError, match=r"precision\.rounding.*apply_gradients"):
        program_of(task, precision={"compute": "bfloat16", "params": "bfloat16", "rounding": "stochastic"}, **PLAIN)


def test_explain_shows_the_rounding():
    assert "parameters bfloat16 rounded stochastically" in run("stochastic", {}, steps=0)[0].explain()


# ---- lost updates


def sizes_of(program):
    sizes = np.asarray(program.checks.sizes, np.float64)
    return dict(zip(program.narrow_leaves, sizes.reshape(-1, *sizes.shape[-2:]).sum(0).tolist(), strict=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_lost_updates_are_measured_on_every_mesh(mesh):
    program, _ = run("nearest", MESHES[mesh], steps=1)
    found = sizes_of(program)
    updates = 2.0**-13 * (X**2).mean(0)
    np.testing.assert_allclose(found["w"], [16 * updates.sum()] * 2, rtol=1e-2)
    np.testing.assert_allclose(found["b"], [16 * 2.0**-13, 0], rtol=1e-2)
    assert run("stochastic", MESHES[mesh], steps=1)[0].checks.sizes is None


def test_groups_measure_their_updates():
    program, _ = run("nearest", {"data": 4}, steps=2, sync={"local_sgd": {"every": 2}}, checkpoint=None)
    size, lost = sizes_of(program)["w"]
    assert lost == size > 0 and program.checks.sizes.shape[0] == 4
    program, _ = run("nearest", {"data": 2, "fsdp": 2}, steps=1, sync={"local_sgd": {"every": 2}}, checkpoint=None)
    size, lost = sizes_of(program)["w"]
    assert lost == size > 0 and program.checks.sizes.shape[:2] == (2, 2)


def test_measurement_works_in_a_per_replica_step():
    def train_step(state, batch):
        mean = sk.pmean((batch.astype(jnp.float32) ** 2).mean())
        return state.apply_gradients({"w": jnp.full(8, mean)}), {}

    init = lambda key: {"w": jnp.ones(8)}
    task = sk.Task(init, optimizer=optax.sgd(2.0**-13), train_step=train_step, train_data=X, view="replica")
    changes = {"compute": "bfloat16", "params": "bfloat16"}
    program = program_of(task, mesh={"data": 4}, precision=changes, **PLAIN)
    program.step(program.init(), program.put(X))
    size, lost = sizes_of(program)["w"]
    assert lost == size > 0
    program = program_of(task, mesh={"data": 4}, precision=changes | {"rounding": "stochastic"}, **PLAIN)
    state, _ = program.step(program.init(), program.put(X))
    assert program.checks.sizes is None and (bits(state)["w"].shape) == (8,)


@pytest.mark.forms(1)
@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("mesh", ["data 4", "fsdp 4", "data 2 x fsdp 2"])
def test_neither_rounding_nor_measurement_communicates(mesh, policy):
    found, temp = {}, {}
    for rounding, params in (("nearest", "float32"), ("nearest", "bfloat16"), ("stochastic", "bfloat16")):
        precision = {"params": params, "rounding": rounding}
        program = program_of(falling(), mesh=MESHES[mesh], precision=precision, on_nonfinite=policy, **PLAIN)
        sent = collectives(program.compiled.as_text(), program.sizes)
        found[rounding, params] = sorted((c.kind, sorted(c.axes), c.in_loop) for c in sent)
        temp[rounding, params] = program.compiled.memory_analysis().temp_size_in_bytes
    assert len(set(map(str, found.values()))) == 1, found
    print(temp)


@pytest.mark.parametrize(
    ("shape", "sampled"),
    [
        ((3, 5), (3, 5)),
        ((1 << 16,), (1 << 16,)),
        ((50_000, 700), (50_000, 1)),
        ((512, 1024), (512, 128)),
        ((0, 4), (0, 4)),
        ((3, 1 << 20), (3, 21_400)),
        ((1 << 18, 4), (1 << 16, 1)),
        ((), ()),
    ],
    ids=str,
)
def test_sample_of_a_leaf_has_all_rows_if_possible(shape, sampled):
    found = jax.eval_shape(lost_updates._sample, jax.ShapeDtypeStruct(shape, jnp.bfloat16)).shape
    assert found == sampled
