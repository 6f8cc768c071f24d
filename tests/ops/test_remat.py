"""Named values: kept on the device or on the host, never another number; a name that keeps nothing is refused."""

import functools
from collections import Counter
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import spmdkit as sk
from spmdkit.config.sections import RematPolicy
from spmdkit.errors import ConfigError
from spmdkit.ops.remat import NAMES, POLICIES
from spmdkit.plan.document import plan_program
from spmdkit.plan.flops import count
from spmdkit.plan.machine.target import open_target, parse_target
from tests.support.core_models import keep_gradient
from tests.support.core_runs import assert_same_run, program_of, train, values_saved
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except

D, F, LAYERS = 16, 32, 3


@functools.cache
def task(wraps=True, within_manual=False):
    """Returns a task of pairs whose hidden values are marked `hidden` (inside a manual part if asked), results
    `block`."""

    def init(key):
        return {
            "up": normal(0, LAYERS, D, F) / 16,
            "down": normal(1, LAYERS, F, D) / 16,
        }

    def block(x_BTD, w):
        if within_manual:
            square = lambda h: checkpoint_name(jnp.square(h), "inside")
            return checkpoint_name(x_BTD + sk.column_row_parallel(x_BTD, [w["up"]], square, w["down"]), "block")
        hidden = checkpoint_name(jnp.square(x_BTD @ w["up"]), "hidden")
        return checkpoint_name(x_BTD + hidden @ w["down"], "block")

    def loss_fn(params, batch, key):
        one = sk.remat(block) if wraps else block
        x_BTD, _ = jax.lax.scan(lambda x, w: (one(x, w), None), batch["x"], params)
        return sk.mean((x_BTD**2).mean((1, 2)))

    data = {"x": np.random.default_rng(0).normal(size=(64, 4, D)).astype(np.float32)}
    rules = [("up", [None, "embed", "mlp"]), ("down", [None, "mlp", "embed"])]
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data, rules=rules)


@functools.cache
def reference():
    return train(program_of(task()), evaluate=False, steps=2)


@pytest.mark.forms(1)
@pytest.mark.parametrize("wraps", [True, False], ids=["sk.remat", "the whole loss"])
@pytest.mark.parametrize(
    ("mesh", "microbatches", "remat"),
    [
        ({}, 1, {"offload": ["hidden"]}),
        ({"data": 8}, 2, {"offload": ["hidden"], "save": ["block"]}),
        ({"fsdp": 4, "tensor": 2}, 1, {"offload": ["hidden", "block"]}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, {"offload": ["hidden"]}),
    ],
    ids=["one device", "manual", "plain", "mapped"],
)
def test_offloaded_values_come_back_unchanged(mesh, microbatches, remat, wraps):
    program = program_of(task(wraps), mesh=mesh, microbatches=microbatches, remat=remat)
    assert "Host" in str(program.traced.jaxpr)
    assert_same_run(train(program, evaluate=False, steps=2), reference())


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    ("mesh", "microbatches", "remat"),
    [
        ({"fsdp": 4, "tensor": 2}, 1, {"offload": ["inside"]}),
        ({"fsdp": 4, "tensor": 2}, 1, {"save": ["inside"]}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, {"offload": ["inside"], "save": ["block"]}),
        ({"fsdp": 4, "tensor": 2}, 1, "dots"),
        ({"fsdp": 4, "tensor": 2}, 2, "full"),
    ],
)
@pytest.mark.parametrize("wraps", [True, False], ids=["sk.remat", "the whole loss"])
def test_names_inside_a_part_are_saved(mesh, microbatches, remat, wraps):
    program = program_of(task(wraps, within_manual=True), mesh=mesh, microbatches=microbatches, remat=remat)
    assert ("Host" in str(program.traced.jaxpr)) == ("offload" in remat)
    assert_same_run(train(program, evaluate=False, steps=2), reference())


@pytest.mark.parametrize(
    ("remat", "products"),
    slow_except([("full", 7)], [("dots", 6), ("full", 7), ("none", 6), ({"save": ["inside"]}, 7)]),
    ids=str,
)
def test_only_what_is_not_kept_is_computed_again(remat, products):
    """Two products forward, four backward; the first one again where its result is not kept. Counted in FLOPs of
    one."""
    program = program_of(task(within_manual=True), mesh={"fsdp": 4, "tensor": 2}, remat=remat)
    one = 2 * 32 * 4 * D * F * LAYERS
    assert count(program.traced.jaxpr).products == products * one
    plan = plan_program(program, open_target(parse_target("cpu:8")))
    assert plan["time"]["hlo_flops"] == products * one / 8
    assert plan["model_flops"] == 6 * one / 8


@pytest.mark.parametrize(
    ("settings", "remat", "message"),
    [
        (
            {},
            {"save": ["hiden"]},
            r"remat.save names 'hiden'.*the marks there are block, decoder_layer_input, hidden.*Did you mean 'hidden'",
        ),
        ({"wraps": False}, {"offload": ["x"]}, r"remat.offload names 'x'.*the marks there are block, hidden"),
    ],
)
def test_a_name_that_keeps_nothing_is_refused(settings, remat, message):
    with pytest.raises(ConfigError, match=message):
        program_of(task(**settings), mesh={"fsdp": 2, "tensor": 4}, remat=remat)


QK, V, T = 4, 6, 5
MARKED = {
    "query_proj": (T, QK),
    "key_proj": (T, QK),
    "value_proj": (T, V),
    "context": (T, V),
    "out_proj": (T, D),
    "hidden": (T, F),
}
"""Name -> shape of the value of one example, of those that the backward pass needs."""


@functools.cache
def attention_task():
    """Returns a task of blocks of attention and MLP, with all values marked by the names of the policies."""
    shapes = {"query": (D, QK), "key": (D, QK), "value": (D, V), "out": (V, D), "up": (D, F), "down": (F, D)}

    def init(key):
        return {name: normal(seed, LAYERS, *shape) / 8 for seed, (name, shape) in enumerate(shapes.items())}

    def block(x_BTD, w):
        q, k, v = (checkpoint_name(x_BTD @ w[name], f"{name}_proj") for name in ("query", "key", "value"))
        mixed = checkpoint_name(jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v, "context")
        x_BTD = x_BTD + jnp.tanh(checkpoint_name(mixed @ w["out"], "out_proj"))
        return x_BTD + checkpoint_name(jnp.square(checkpoint_name(x_BTD @ w["up"], "hidden")) @ w["down"], "mlpwo")

    def loss_fn(params, batch, key):
        x_BTD, _ = jax.lax.scan(lambda x, w: (sk.remat(block)(x, w), None), batch["x"], params)
        return sk.mean((x_BTD**2).mean((1, 2)))

    data = {"x": np.random.default_rng(0).normal(size=(64, T, D)).astype(np.float32)}
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data)


SAVED = {
    "minimal": {"query_proj", "key_proj", "value_proj", "out_proj", "hidden"},
    "minimal_flash": {"query_proj", "key_proj", "value_proj", "context", "out_proj", "hidden"},
    "save_dot_except_mlp": {"query_proj", "key_proj", "value_proj", "out_proj"},
    "save_qkv_proj": {"query_proj", "key_proj", "value_proj"},
    "offload_layer_inputs": set(),
}


@pytest.mark.forms(3)
@pytest.mark.parametrize("remat", SAVED)
def test_a_policy_saves_what_its_name_says(remat):
    program = program_of(attention_task(), remat=remat)
    expected = Counter((32, *MARKED[name]) for name in SAVED[remat])
    expected[32, T, D] += 1
    assert values_saved(program) == {(shape, remat == "offload_layer_inputs"): num for shape, num in expected.items()}
    reference = train(program_of(attention_task()), evaluate=False, steps=2)
    assert_same_run(train(program, evaluate=False, steps=2), reference)


def test_a_policy_that_saves_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"remat: save_qkv_proj saves query_proj.*the marks there are block"):
        program_of(task(), remat="save_qkv_proj")
    with pytest.raises(ConfigError, match="offload_layer_inputs saves decoder_layer_input"):
        program_of(task(wraps=False), remat="offload_layer_inputs")


def test_the_config_names_every_policy():
    assert set(get_args(RematPolicy)) == {*NAMES, "auto"}
    assert set(POLICIES) == set(SAVED)
