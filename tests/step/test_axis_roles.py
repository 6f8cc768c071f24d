"""A program with its own names of mesh axes: `mesh: {dp: 2, model: 2}` and `roles: {dp: data, model: tensor}`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import name_axes
from tests.step.test_annotations import DATA, DOWN, UP, expected, squares
from tests.support.core_runs import TOLERANCE, assert_close, program_of, train

ROLES = {"dp": "data", "model": "tensor"}
MESHES = {"one": {}, "dp 4": {"dp": 4}, "dp 2 x fsdp 2": {"dp": 2, "fsdp": 2}, "dp 2 x model 2": {"dp": 2, "model": 2}}
RULES = [("up", (None, "model")), ("down", ("model", None))]
constrain = lax.with_sharding_constraint


@pytest.fixture(autouse=True)
def spmdkit_names():
    yield
    name_axes({})


def init(key):
    return {"up": constrain(jnp.asarray(UP), P(None, "model")), "down": constrain(jnp.asarray(DOWN), P("model"))}


def annotated(params, batch):
    return squares(params, batch, lambda x: constrain(x, P("dp")), lambda x: constrain(x, P("dp", "model")))


def loss_fn(params, batch, key):
    return sk.mean(annotated(params, batch))


def train_step(state, batch):
    value, grads = jax.value_and_grad(lambda p: annotated(p, batch).mean())(state.params)
    return state.apply_gradients(grads), {"loss": value}


def shard_map_step(state, batch):
    def value_and_grad(params, batch):
        assert lax.axis_index("model").shape == ()
        return jax.value_and_grad(lambda p: lax.pmean(squares(p, batch).mean(), "dp"))(params)

    value, grads = jax.shard_map(value_and_grad, in_specs=(P(), P("dp")), out_specs=P())(state.params, batch)
    return state.apply_gradients(grads), {"loss": value}


def explicit_step(state, batch):
    def losses(params):
        hidden = jax.nn.gelu(jnp.einsum("bd,df->bf", batch["x"], params["up"], out_sharding=P("dp", "model")))
        out = jnp.einsum("bf,fd->bd", hidden, params["down"], out_sharding=P("dp", None))
        return ((out - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(losses)(state.params)
    return state.apply_gradients(grads), {"loss": value}


PROGRAMS = {
    "loss": {"loss_fn": loss_fn},
    "step": {"train_step": train_step},
    "shard_map": {"train_step": shard_map_step},
    "explicit": {"train_step": explicit_step},
}


def program(kind, mesh, **settings):
    data = {"train_data": DATA, "rules": RULES, "optimizer": optax.sgd(0.1)}
    settings = {"roles": ROLES, "mesh": mesh, "batch_size": 16} | settings
    return program_of(sk.Task(init, **PROGRAMS[kind], **data), **settings)


@pytest.mark.forms(6)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_with_its_own_names_is_one_device(kind, mesh):
    run = train(program(kind, MESHES[mesh]), evaluate=False, steps=4)
    assert_close(run.losses, expected().losses, TOLERANCE)
    assert_close(run.params, expected().params, TOLERANCE)


def test_a_constraint_on_a_mesh_with_explicit_axes_is_refused_as_by_jax():
    mesh = jax.make_mesh((2, 2), ("dp", "model"), axis_types=(AxisType.Explicit,) * 2)

    def loss_fn(params, batch, key):
        placed = lambda x: constrain(x, NamedSharding(mesh, P("dp", "model")))
        return sk.mean(squares(params, batch, lambda x: constrain(x, P("dp")), placed))

    task = sk.Task(init, loss_fn, optax.sgd(0.1), train_data=DATA, rules=RULES)
    with pytest.raises(ConfigError, match="can only refer to Auto axes"):
        program_of(task, roles=ROLES, mesh=MESHES["dp 2 x model 2"], batch_size=16)


def test_output_has_the_names_of_the_user():
    made = program("loss", MESHES["dp 2 x model 2"])
    assert "dp 2 x model 2: 4 devices" in made.explain() and "P(None, 'model')" in made.explain()
    assert "over dp (2 replicas)" in made.explain() and "tensor" not in made.explain()


def test_the_layout_and_the_written_config_accept_both_names():
    axes = {"layout": {"axes": {"wide": "model"}}, "mesh": {"dp": 2, "tensor": 2}}
    config = sk.Config(task="t.py:t", roles=ROLES, **axes)
    assert config.layout.axes == {"wide": "tensor"} and config.mesh.sizes() == {"data": 2, "tensor": 2}
    assert sk.Config(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"roles": {"dp": "date"}, "mesh": {}}, r"roles.dp: .*date"),
        ({"roles": {"data": "tensor"}, "mesh": {}}, "roles.data: .* name of another axis"),
        ({"roles": {"a": "data", "b": "data"}, "mesh": {}}, "roles: a and b both have the role data"),
        ({"roles": ROLES, "mesh": {"dp": 2, "data": 2}}, "mesh.dp: "),
        ({"roles": ROLES, "mesh": {"mp": 2}}, "mesh.mp: unknown key"),
        ({"mesh": {"dp": 2}}, r"mesh.dp: unknown key.* roles: \{dp: data\}"),
    ],
)
def test_mistakes_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        sk.Config(task="t.py:t", **settings)


def test_an_explicit_program_reshards_by_its_own_names():
    def explicit_init(key):
        return {"up": jax.reshard(jnp.asarray(UP), P(None, "model")), "down": jnp.asarray(DOWN)}

    def reshard_step(state, batch):
        return explicit_step(state, batch | {"x": jax.reshard(batch["x"], P("dp", None))})

    task = sk.Task(explicit_init, train_step=reshard_step, optimizer=optax.sgd(0.1), train_data=DATA, rules=RULES)
    run = train(program_of(task, roles=ROLES, mesh={"dp": 2, "model": 2}, batch_size=16), evaluate=False, steps=4)
    assert_close(run.losses, expected().losses, TOLERANCE)
    assert_close(run.params, expected().params, TOLERANCE)
