"""A train state of the user's own type, with its own optimizer, trains, evaluates and is saved like the default one."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state
from jax import lax

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.step.test_annotations import DATA, MESHES, RULES
from tests.support.core_runs import TOLERANCE, assert_close, program_of
from tests.support.fixed_numbers import normal

TX = optax.adam(1e-2)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16, use_bias=False, name="up")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="batch" if train else None)(x)
        return nn.Dense(4, name="down")(nn.relu(x))


class FlaxState(train_state.TrainState):
    batch_stats: Any


NET = Net()


def flax_init(key):
    variables = NET.init(key, jnp.zeros((1, 8)), train=False)
    return FlaxState.create(apply_fn=NET.apply, tx=TX, **variables)


def flax_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, batch["x"], train=True, mutable=["batch_stats"])
        return ((out - batch["y"]) ** 2).mean(), new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=lax.pmean(grads, "batch"), batch_stats=lax.pmean(new["batch_stats"], "batch"))
    return state, {"loss": lax.pmean(loss, "batch")}


def flax_eval(state, batch):
    out = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, batch["x"], train=False)
    return {"mse": sk.mean(((out - batch["y"]) ** 2).mean(-1))}


FLAX = {"init": flax_init, "train_step": flax_step, "eval_fn": flax_eval, "view": "replica", "axis_name": "batch"}
KERNELS = [("up/kernel", (None, "mlp")), ("down/kernel", ("mlp", None))]


class Tuple(NamedTuple):
    weights: Any
    moments: Any
    count: Any


def tuple_init(key):
    weights = {"up": normal(0, 8, 16) * 0.3, "down": jnp.zeros((16, 4))}
    return Tuple(weights, TX.init(weights), 0)


def tuple_step(state, batch):
    loss = lambda w: ((jax.nn.gelu(batch["x"] @ w["up"]) @ w["down"] - batch["y"]) ** 2).mean()
    value, grads = jax.value_and_grad(loss)(state.weights)
    updates, moments = TX.update(grads, state.moments, state.weights)
    rate = 1 / (1 + state.count)
    weights = jax.tree.map(lambda w, u: w + rate * u, state.weights, updates)
    return Tuple(weights, moments, state.count + 1), {"loss": value}


TUPLE = {
    "init": tuple_init,
    "train_step": tuple_step,
    "eval_fn": lambda state, batch: {"size": sk.mean(jnp.abs(batch["x"] @ state.weights["up"]).mean(-1))},
    "state": sk.StateView(params="weights", opt_state="moments", step="count"),
}


@jax.tree_util.register_dataclass
@dataclass
class Pair:
    """Two networks that train each other, each with its optimizer."""

    generator: Any
    critic: Any
    generator_moments: Any
    critic_moments: Any
    seen: Any


def pair_init(key):
    generator, critic = {"up": normal(0, 8, 4) * 0.3}, {"down": jnp.ones((4, 1))}
    return Pair(generator, critic, TX.init(generator), optax.sgd(0.01).init(critic), jnp.zeros((), jnp.int32))


def pair_step(state, batch):
    score = lambda g, c, x: (jnp.tanh(x @ g["up"]) @ c["down"]).mean()
    of_critic = lambda c: ((score(state.generator, c, batch["x"]) - batch["y"].mean()) ** 2).mean()
    lost, grads = jax.value_and_grad(of_critic)(state.critic)
    critic = jax.tree.map(lambda p, g: p - 0.01 * g, state.critic, grads)
    grads = jax.grad(lambda g: -score(g, critic, batch["x"]))(state.generator)
    updates, moments = TX.update(grads, state.generator_moments)
    generator = optax.apply_updates(state.generator, updates)
    seen = state.seen + batch["x"].shape[0]
    return Pair(generator, critic, moments, state.critic_moments, seen), {"loss": lost}


PAIR = {
    "init": pair_init,
    "train_step": pair_step,
    "state": sk.StateView(params=["generator", "critic"], opt_state=["generator_moments", "critic_moments"]),
}


class Module(eqx.Module):
    """A module whose activation function is a leaf."""

    model: eqx.nn.MLP
    moments: Any


def module_init(key):
    model = eqx.nn.MLP(8, 4, 16, 1, key=key)
    return Module(model, TX.init(eqx.filter(model, eqx.is_array)))


def module_errors(model, batch):
    return ((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2).mean(-1)


@eqx.filter_jit
def module_step(state, batch):
    value, grads = eqx.filter_value_and_grad(lambda model: module_errors(model, batch).mean())(state.model)
    updates, moments = TX.update(grads, state.moments)
    return Module(eqx.apply_updates(state.model, updates), moments), {"loss": value}


MODULE = {
    "init": module_init,
    "train_step": module_step,
    "eval_fn": lambda state, batch: {"mse": sk.mean(module_errors(state.model, batch))},
    "state": sk.StateView(params="model", opt_state="moments"),
}
TASKS = {
    "flax": (FLAX, KERNELS),
    "tuple": (TUPLE, RULES),
    "module": (MODULE, [("layers/0/weight", ("mlp", None))]),
    "pair": (PAIR, [("generator/up", (None, "mlp")), ("critic/down", ("mlp", None))]),
}


def program(kind, mesh="one", changes=(), **settings):
    functions, rules = TASKS[kind]
    functions = functions | dict(changes)
    evaluated = {"eval_data": DATA} if "eval_fn" in functions else {}
    task = sk.Task(**functions, train_data=DATA, rules=rules, **evaluated)
    return program_of(task, mesh=MESHES[mesh], batch_size=16, steps=4, **settings)


class Run(NamedTuple):
    """The result of four steps."""

    losses: Any
    params: Any
    model_state: Any
    eval: Any


def run(made):
    state, losses = made.init(), []
    for _, batch in made.batches(stop=4):
        state, metrics = made.step(state, batch)
        losses.append(metrics["loss"])
    return Run(*jax.device_get((losses, state.params, state.model_state)), made.eval(state) if made.has_eval else {})


@functools.cache
def one(kind):
    return run(program(kind))


def plain(kind):
    """The parameters after the same steps of the user's functions alone, in `jax.jit` on one device."""
    functions = TASKS[kind][0]
    reference = program(kind)
    state = functions["init"](jax.random.key(0))
    step = (eqx.filter_jit if kind == "module" else jax.jit)(
        jax.vmap(functions["train_step"], (None, 0), None, axis_name="batch")
        if kind == "flax"
        else functions["train_step"]
    )
    for _, batch in reference.batches(stop=4):
        rows = jax.tree.map(lambda x: x[None] if kind == "flax" else x, batch.examples)
        state, _ = step(state, rows)
    return state


@pytest.mark.forms(2)
@pytest.mark.parametrize("kind", TASKS)
def test_a_step_on_its_own_state_equals_plain_jax(kind):
    state, view = plain(kind), TASKS[kind][0].get("state") or sk.StateView("params")
    parts = [view.params] if isinstance(view.params, str) else view.params
    expected = {part: getattr(state, part) for part in parts}
    assert_close(jax.tree.leaves(one(kind).params), jax.tree.leaves(eqx.filter(expected, eqx.is_array)), TOLERANCE)


@pytest.mark.forms(3)
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one"])
@pytest.mark.parametrize("kind", TASKS)
def test_a_step_on_its_own_state_is_the_same_on_every_mesh(kind, mesh):
    assert_close(run(program(kind, mesh)), one(kind), TOLERANCE)


def test_optimizer_states_are_sharded_like_parameters():
    specs = {p.path: p.spec for p in program("flax", "data 2 x fsdp 2").layout}
    assert specs["opt_state/0/mu/up/kernel"] == specs["params/up/kernel"] != specs["params/down/bias"]
    assert "model_state/batch_stats/BatchNorm_0/mean" in specs


def test_the_average_of_the_parameters_is_evaluated():
    averaged = run(program("flax", ema=0.5, eval={"params": "ema"}))
    assert_close(averaged.params, one("flax").params, TOLERANCE)
    assert abs(averaged.eval["mse"] - one("flax").eval["mse"]) > 1e-6


@pytest.mark.parametrize(
    ("kind", "changes", "settings", "message"),
    [
        ("flax", {"axis_name": None}, {}, "axis_name='batch'"),
        (
            "flax",
            {},
            {"optimizer": {"name": "adamw"}, "learning_rate": 0.1},
            "optimizer has no effect: init returns a FlaxState",
        ),
        ("tuple", {"state": sk.StateView("weight", "moments")}, {}, "params is 'weight', .* Did you mean 'weights/"),
        ("tuple", {"state": sk.StateView("weights", "moments", "weights/up")}, {}, "not an integer scalar"),
        ("tuple", {"train_step": lambda state, batch: (state.weights, {})}, {}, "It must return .*: the Tuple"),
    ],
)
def test_mistakes_are_refused(kind, changes, settings, message):
    with pytest.raises(ConfigError, match=message):
        program(kind, changes=changes, **settings)
