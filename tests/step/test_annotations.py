"""Sharding annotations as people write them (bare specs, own meshes, own shard_maps) change no number on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.core_runs import TOLERANCE, assert_close, program_of, train

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(64, 8)).astype(np.float32), "y": RNG.normal(size=(64, 4)).astype(np.float32)}
UP, DOWN = (RNG.normal(size=shape).astype(np.float32) * 0.3 for shape in ((8, 16), (16, 4)))
MESHES = {
    "one": {},
    "data 4": {"data": 4},
    "data 2 x fsdp 2": {"data": 2, "fsdp": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
}
RULES = [("up", (None, "mlp")), ("down", ("mlp", None))]
constrain = lax.with_sharding_constraint


def plain_init(key):
    return {"up": jnp.asarray(UP), "down": jnp.asarray(DOWN)}


def annotated_init(key):
    return {"up": constrain(jnp.asarray(UP), P(None, "tensor")), "down": constrain(jnp.asarray(DOWN), P("tensor"))}


def squares(params, batch, rows=lambda x: x, hidden=lambda x: x):
    h = hidden(jax.nn.gelu(rows(batch["x"]) @ params["up"]))
    return ((rows(h @ params["down"]) - batch["y"]) ** 2).mean(-1)


def bare(params, batch):
    return squares(params, batch, lambda x: constrain(x, P("data")), lambda x: constrain(x, P("data", "tensor")))


def on_own_mesh(params, batch):
    """Constraints of a mesh with names and a shape of its own: a hint on other devices and shapes."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "mp"))
    place = lambda x, *spec: constrain(x, NamedSharding(mesh, P(*spec)))
    return squares(params, batch, lambda x: place(x, "dp"), lambda x: place(x, "dp", "mp"))


def as_step(losses):
    def train_step(state, batch):
        value, grads = jax.value_and_grad(lambda p: losses(p, batch).mean())(state.params)
        return state.apply_gradients(grads), {"loss": value}

    return {"train_step": train_step}


def as_loss(losses):
    return {"loss_fn": lambda params, batch, key: sk.mean(losses(params, batch))}


def mapped_step(own_mesh):
    """A step whose gradient is a `shard_map`: over the mesh in context, or one with explicit axes and other names."""

    def train_step(state, batch):
        name = "dp" if own_mesh else "data"
        size = jax.sharding.get_abstract_mesh().size
        options = {"mesh": jax.make_mesh((size,), ("dp",), devices=jax.devices()[:size])} if own_mesh else {}

        def value_and_grad(params, batch):
            return jax.value_and_grad(lambda p: lax.pmean(squares(p, batch).mean(), name))(params)

        mapped = jax.shard_map(value_and_grad, in_specs=(P(), P(name)), out_specs=P(), **options)
        value, grads = mapped(state.params, batch)
        return state.apply_gradients(grads), {"loss": value}

    return {"train_step": train_step}


def mapped_loss(own_mesh):
    """A loss with a tensor-parallel product in a `shard_map`: over all axes of a mesh of its own, or over `tensor`."""

    def mlp(x, up, down):
        return lax.psum(jax.nn.gelu(x @ up) @ down, "mp" if own_mesh else "tensor")

    def losses(params, batch):
        size, rows, name = (
            jax.sharding.get_abstract_mesh().size,
            P("dp") if own_mesh else P(),
            "mp" if own_mesh else "tensor",
        )
        shape = (2, 2) if size == 4 else (1, 1)
        mesh = Mesh(np.array(jax.devices()[:size]).reshape(shape), ("dp", "mp"))
        options = {"mesh": mesh} if own_mesh else {"axis_names": {name}}
        mapped = jax.shard_map(mlp, in_specs=(rows, P(None, name), P(name)), out_specs=rows, **options)
        return ((mapped(batch["x"], params["up"], params["down"]) - batch["y"]) ** 2).mean(-1)

    return as_loss(losses)


PROGRAMS = {
    "bare specs in a loss": as_loss(bare),
    "bare specs in a step": as_step(bare),
    "own mesh in a loss": as_loss(on_own_mesh),
    "own mesh in a step": as_step(on_own_mesh),
    "shard_map in context": mapped_step(own_mesh=False),
    "shard_map on own mesh": mapped_step(own_mesh=True),
    "shard_map on own mesh in a loss": mapped_loss(own_mesh=True),
    "shard_map over one axis in a loss": mapped_loss(own_mesh=False),
}


def program(functions, mesh, init=annotated_init, **settings):
    data = {"train_data": DATA, "rules": RULES, "optimizer": optax.sgd(0.1)}
    return program_of(sk.Task(init, **functions, **data), mesh=mesh, batch_size=16, steps=4, **settings)


@functools.cache
def expected():
    return train(program(as_loss(squares), {}, plain_init), evaluate=False, steps=4)


@pytest.mark.forms(10)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_annotated_program_equals_a_plain_one(kind, mesh):
    run = train(program(PROGRAMS[kind], MESHES[mesh]), evaluate=False, steps=4)
    assert_close(run.losses, expected().losses, TOLERANCE)
    assert_close(run.params, expected().params, TOLERANCE)


@pytest.mark.parametrize("losses", [bare, on_own_mesh])
def test_annotations_over_replica_axes_equal_a_plain_program(losses):
    """The user's mesh has the shape of the program's, which has only replica axes: its steps are in `shard_map`."""
    run = train(program(as_loss(losses), {"replica": 2, "data": 2}), evaluate=False, steps=4)
    assert_close(run.losses, expected().losses, TOLERANCE)
    assert_close(run.params, expected().params, TOLERANCE)


MAPPED_AT_IMPORT = jax.shard_map(
    lambda x: lax.psum(x.sum(0, keepdims=True), "dp"),
    mesh=jax.make_mesh((4,), ("dp",), devices=jax.devices()[:4]),
    in_specs=P("dp"),
    out_specs=P(),
)


def test_a_shard_map_of_a_module_runs_in_a_step():
    def train_step(state, batch):
        value = MAPPED_AT_IMPORT(squares(state.params, batch)[:, None]).mean() / 16
        return as_step(squares)["train_step"](state, batch)[0], {"loss": value}

    run = train(program({"train_step": train_step}, MESHES["data 4"]), evaluate=False, steps=1)
    assert_close(run.losses, expected().losses[:1], TOLERANCE)


def test_a_shard_map_on_another_number_of_devices_is_refused():
    with pytest.raises(
        ConfigError, match=r"shard_map \(.*test_annotations.py:\d+\) has a mesh dp 4 .* 2 devices: data 2"
    ):
        program(
            {"train_step": lambda state, batch: (state, {"loss": MAPPED_AT_IMPORT(batch["x"]).mean()})}, {"data": 2}
        )


def test_annotations_shard_model_axes_and_add_no_reduction():
    annotated = program(as_loss(bare), MESHES["data 2 x tensor 2"])
    plain = program(as_loss(squares), MESHES["data 2 x tensor 2"], plain_init)
    reductions = lambda p: p.compiled.as_text().count(" all-reduce(")
    assert reductions(annotated) == reductions(plain)
    constraints = lambda p: [line for line in p.lowered.as_text().splitlines() if "sharding_constraint" in line]
    over_tensor = lambda p: sum('"tensor"' in line for line in constraints(p))
    assert over_tensor(annotated) > over_tensor(plain)


def test_a_mesh_of_the_user_is_a_note():
    other = program(as_loss(on_own_mesh), MESHES["data 4"])
    assert "sharding constraints of a mesh dp 2 x mp 2 have no effect" in other.explain()
    same = program(as_step(on_own_mesh), MESHES["data 2 x tensor 2"]).explain()
    assert "constraints of a mesh dp 2 x mp 2 apply to the program's: dp = data, mp = tensor" in same
    assert "have no effect" not in same


def test_a_loss_without_a_batching_rule_is_on_global_arrays():
    @custom_partitioning
    def double(x):
        return 2 * x

    of_operand = lambda mesh, operands, result: operands[0].sharding
    partition = lambda mesh, operands, result: (mesh, lambda x: 2 * x, operands[0].sharding, (operands[0].sharding,))
    double.def_partition(partition, of_operand, sharding_rule="i j -> i j")
    losses = lambda params, batch: squares(params, batch | {"x": double(batch["x"]) / 2})
    made = program(as_loss(losses) | {"eval_data": DATA}, MESHES["data 2 x tensor 2"])
    assert "plain: not mapped, since the loss cannot be, on global arrays" in made.explain()
    run = train(made, steps=4)
    assert_close(run.params, expected().params, TOLERANCE)
    assert_close(run.eval["loss"], squares(jax.tree.map(jnp.asarray, expected().params), DATA).mean(), TOLERANCE)


def test_a_mesh_that_the_user_set_decides_nothing():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    with jax.set_mesh(mesh):
        run = train(program(as_loss(squares) | {"eval_data": DATA}, MESHES["data 4"]), steps=4)
        assert jax.sharding.get_mesh() == mesh
    assert_close(run.params, expected().params, TOLERANCE)


def test_a_file_that_sets_a_mesh_runs(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(
        "import jax, jax.numpy as jnp, numpy as np, optax\n"
        "import spmdkit as sk\n"
        "jax.set_mesh(jax.make_mesh((4, 2), ('x', 'y')))\n"
        "loss = lambda params, batch, key: sk.mean((batch['x'] @ params['w']) ** 2)\n"
        "data = {'x': np.ones((32, 4), np.float32)}\n"
        "task = sk.Task(lambda key: {'w': jnp.ones(4)}, loss, optax.sgd(0.1), data, data)\n"
    )
    (tmp_path / "run.yaml").write_text(
        "task: task.py:task\nrun_dir: run\nsteps: 3\nbatch_size: 8\ndevices: cpu:4\nmesh: {data: 4}\ncheckpoint: null\n"
    )
    result = sk.train(sk.load_config(tmp_path / "run.yaml"))
    assert result.evaluation["loss"] < 16
    assert jax.sharding.get_mesh().empty
