"""Programs in JAX's explicit sharding mode have the numbers of one device on every mesh."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.step.test_annotations import DATA, DOWN, MESHES, RULES, expected, plain_init
from tests.support.core_runs import TOLERANCE, assert_close, program_of, train


def with_reshard(params, batch):
    rows = jax.reshard(batch["x"], P("data", None))
    hidden = jax.nn.gelu(jax.reshard(rows @ params["up"], P("data", "tensor")))
    out = jax.reshard(hidden, P("data", None)) @ jax.reshard(params["down"], P(None, None))
    return ((out - jax.reshard(batch["y"], P("data", None))) ** 2).mean(-1)


def with_out_sharding(params, batch):
    hidden = jax.nn.gelu(jnp.einsum("bd,df->bf", batch["x"], params["up"], out_sharding=P("data", "tensor")))
    out = jnp.einsum("bf,fd->bd", hidden, params["down"], out_sharding=P("data", None))
    return ((out - batch["y"]) ** 2).mean(-1)


def reads_types(params, batch):
    sharding = jax.typeof(batch["x"]).sharding
    assert sharding.mesh.are_all_axes_explicit and (sharding.mesh.size == 1 or sharding.spec[0] == "data")
    return with_out_sharding(params, batch)


def as_step(losses):
    def train_step(state, batch):
        value, grads = jax.value_and_grad(lambda p: losses(p, batch).mean())(state.params)
        return state.apply_gradients(grads), {"loss": value}

    return {"train_step": train_step}


def as_loss(losses):
    return {"loss_fn": lambda params, batch, key: sk.mean(losses(params, batch))}


PROGRAMS = {
    "reshard in a step": as_step(with_reshard),
    "out_sharding in a step": as_step(with_out_sharding),
    "types in a step": as_step(reads_types),
    "out_sharding in a loss": as_loss(with_out_sharding),
}


def program(functions, mesh, sharding="explicit", eval_data=None, init=plain_init, **settings):
    data = {"train_data": DATA, "eval_data": eval_data, "rules": RULES, "optimizer": optax.sgd(0.1)}
    return program_of(sk.Task(init, **functions, **data, sharding=sharding), mesh=mesh, batch_size=16, **settings)


@pytest.mark.forms(4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_explicit_program_equals_a_plain_one(kind, mesh):
    run = train(program(PROGRAMS[kind], MESHES[mesh]), evaluate=False, steps=4)
    assert_close(run.losses, expected().losses, TOLERANCE)
    assert_close(run.params, expected().params, TOLERANCE)


def test_the_reductions_of_an_explicit_step_are_those_of_the_default_step():
    reductions = lambda p: p.compiled.as_text().count(" all-reduce(")
    for mesh in ("data 4", "data 2 x tensor 2"):
        default = program(as_loss(lambda p, b: with_auto(p, b)), MESHES[mesh], "auto")
        assert reductions(program(PROGRAMS["out_sharding in a step"], MESHES[mesh])) <= reductions(default)


def with_auto(params, batch):
    return ((jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2).mean(-1)


def test_explicit_mode_is_detected():
    found = program(PROGRAMS["reshard in a step"], MESHES["data 2 x tensor 2"], "auto")
    assert "form" in found.explain() and "plain: JAX's explicit sharding mode" in found.explain()


@pytest.mark.parametrize("mesh", ["one", "data 4", "data 2 x tensor 2"])
def test_explicit_functions_are_evaluated(mesh):
    evaluated = {"eval_data": {name: x[:50] for name, x in DATA.items()}}
    run = train(program(PROGRAMS["out_sharding in a loss"], MESHES[mesh], **evaluated), steps=4)
    alone = {"eval_fn": lambda params, batch: {"loss": sk.mean(with_out_sharding(params, batch))}}
    step = train(program(PROGRAMS["types in a step"] | alone, MESHES[mesh], **evaluated), steps=4)
    params = jax.tree.map(jnp.asarray, expected().params)
    plain = float(with_auto(params, evaluated["eval_data"]).mean())
    assert_close([run.eval["loss"], step.eval["loss"]], [plain, plain], TOLERANCE)


@pytest.mark.parametrize("mesh", ["one", "data 2 x tensor 2"])
@pytest.mark.parametrize("sharding", ["auto", "explicit"])
def test_an_explicit_init_is_the_plain_one(sharding, mesh):
    def init(key):
        weights = jax.random.normal(key, (8, 16), out_sharding=P(None, "tensor"))
        assert jax.typeof(weights).sharding.mesh.are_all_axes_explicit
        return {"up": weights, "down": jax.reshard(jnp.asarray(DOWN), P("tensor", None))}

    made = program(PROGRAMS["reshard in a step"], MESHES[mesh], sharding, init=init)
    params = jax.device_get(made.init().params)
    assert_close(params, {"up": jax.random.normal(jax.random.key(0), (8, 16)), "down": DOWN}, 0)
    assert train(made, evaluate=False, steps=2).losses


def test_settings_of_mapped_replicas_are_refused():
    with pytest.raises(ConfigError, match="reducer"):
        program(PROGRAMS["out_sharding in a loss"], MESHES["data 4"], reducer={"topk": {"fraction": 0.1}})
    with pytest.raises(ConfigError, match="sharding is 'manual'"):
        program(PROGRAMS["reshard in a step"], MESHES["data 4"], "manual")
