"""Every file in spmdkit/communication/reducers keeps the contract of `reducers.base`. A new reducer is a file there and
a row here."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from spmdkit.communication.reducers import coded
from spmdkit.communication.reducers.base import ReducedLeaf, ReduceGroup, stateless
from spmdkit.foundation import plugins
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.reducer_runs import (
    MESHES,
    added_up,
    applied_and_owed,
    assert_same_replicas,
    program,
    residuals,
    true_sum,
)


class Row(NamedTuple):
    """What is special about a reducer.

    Attributes:
        kinds: of the large collectives over replicas.
        options: with which it is run here, where its own are not for a model this small.
        at: the mesh of its formula of bytes and of its mutants.
        mapped: another mesh on which it is run by default, and where its exact options are.
        rounds: what carries the gradient stands in a loop, whose runs only the gradient knows: the formula is that of
            one.
    """

    kinds: frozenset[str]
    options: tuple[tuple[str, object], ...] = ()
    at: str = "data 4"
    mapped: str = ""
    rounds: bool = False


BY_OWNERS = frozenset({"all_to_all", "all_gather"})
TENSOR, ZERO_2 = "replica 2 x fsdp 2 x tensor 2", "data 2 x fsdp 2 zero 2"

ROWS = {
    "sum": Row(frozenset({"all_reduce"})),
    "ordered": Row(BY_OWNERS),
    "bfloat16": Row(BY_OWNERS),
    "float8": Row(BY_OWNERS),
    "sign": Row(BY_OWNERS),
    "adasum": Row(BY_OWNERS),
    "powersgd": Row(frozenset({"all_reduce"}), mapped=TENSOR),
    "topk": Row(frozenset({"all_gather"}), (("fraction", 0.25), ("most", None))),
    "sparse_rows": Row(
        frozenset({"all_gather", "all_reduce"}), (("leaves", ["up"]), ("rows", 48), ("most", None)), rounds=True
    ),
    "hierarchical": Row(BY_OWNERS, at="replica 2 x data 2"),
    "int8": Row(BY_OWNERS, mapped=ZERO_2),
}
ANOTHER_SUM = {"adasum"}
"""What is no sum at any options: equal to its own formula, test_adasum.py."""


def test_every_reducer_has_a_row():
    assert plugins.names("reducers") == sorted(ROWS)


def chosen(name, **more):
    """Returns the choice of a reducer with the options of its row, and more."""
    options = dict(ROWS[name].options) | more
    return {name: options} if options else name


def lossless(name):
    """Returns the choice of a reducer at which its result equals the sum."""
    return chosen(name, **(plugins.make("reducers", chosen(name)).exact_options or {}))


STATEFUL = [name for name in ROWS if plugins.make("reducers", chosen(name)).init is not stateless]


@functools.cache
def trained(mesh, reducer='"sum"'):
    """Returns a program and (what 8 steps apply, the state after them); the reducer is JSON."""
    made = program(mesh, json.loads(reducer), microbatches=2 if mesh == "data 4" else 1)
    return made, *added_up(made)


def check_sum(choice, mesh):
    """Fails unless what is applied is the true sum."""
    assert_close(trained(mesh, json.dumps(choice))[1], true_sum(mesh))


def check_replicas(choice, mesh):
    """Fails unless all replicas hold the same bits after some steps, in the form of the step that the sum has."""
    made, _, state = trained(mesh, json.dumps(choice))
    assert made.form == trained(mesh)[0].form
    assert_same_replicas((state.params, state.opt_state))


def check_bytes(choice, row, mesh=None):
    """Fails unless a compiled step sends the bytes of the reducer's formula, by the collectives of its row, after its
    last microbatch."""
    made, _, state = trained(mesh or row.at, json.dumps(choice))
    bill = read_bill(parse(made.compiled.as_text()), made.sizes)
    in_loop = [c.op for c in bill.collectives if c.in_loop]
    assert in_loop == ["all_gather"] * row.rounds, f"{len(in_loop)} collectives stand in a loop"
    large = [c for c in bill.collectives if c.bytes_at_least > 1024]
    assert {c.op for c in large} == row.kinds
    axes = {axis: size for axis, size in made.sizes.items() if size > 1}
    leaves = [ReducedLeaf(path, x.shape, axes, ()) for path, x in state.params.items()]
    expected = made.reducer.bytes_sent(leaves)  # with which the loss may travel
    assert sum(c.bytes_at_least for c in large) == pytest.approx(expected, rel=2e-3, abs=64)


FORMS = [
    pytest.param(name, mesh, marks=() if mesh in (row.at, row.mapped) else pytest.mark.slow)
    for name, row in ROWS.items()
    for mesh in MESHES
    if (name, mesh) != ("adasum", ZERO_2) and (name != "hierarchical" or mesh == row.at)
]


@pytest.mark.forms(4)
@pytest.mark.parametrize("name, mesh", FORMS)
def test_replicas_are_bitwise_equal_in_sums_form(name, mesh):
    check_replicas(chosen(name), mesh)


@pytest.mark.parametrize("name, mesh", [form for form in FORMS if form.values[0] in STATEFUL])
def test_applied_and_residual_add_up_to_true_sum(name, mesh):
    _, applied, state = trained(mesh, json.dumps(chosen(name)))
    assert_close(jax.tree.map(lambda x, y: np.asarray(x, np.float64) + y, applied, residuals(state)), true_sum(mesh))


@pytest.mark.parametrize(
    "name, mesh",
    [
        pytest.param(name, row.mapped or row.at, marks=() if name == "int8" else pytest.mark.slow)
        for name, row in ROWS.items()
        if name not in {"sum", *ANOTHER_SUM}
    ],
)
def test_exact_options_equal_sum(name, mesh):
    reducer = plugins.make("reducers", chosen(name))
    assert reducer.exact or reducer.exact_options, "an inexact reducer has options at which it is the sum"
    check_sum(lossless(name), mesh)


@pytest.mark.parametrize("name", [name for name in ROWS if name != "hierarchical"])  # test_hierarchical.py
def test_bytes_match_formula_outside_of_loops(name):
    check_bytes(chosen(name), ROWS[name])


@pytest.mark.parametrize("name", ROWS)
def test_float64_gradient_is_reduced_without_promotion(name):
    """A sum of float64 and of what is owed in float32, or of integers of two sizes, would be refused."""
    made = plugins.make("reducers", chosen(name))

    def local(leaf, states):
        over = ReduceGroup(("replica", "data"), 4, lambda: jax.random.key(0), ("up",))
        (total,), new = made.apply([leaf[0]], [{name: x[0] for name, x in states.items()}], over)
        return total, {name: x[None] for name, x in new[0].items()}

    mesh, rows = (
        Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "data")),
        PartitionSpec(("replica", "data")),
    )
    shape = (64, 128) if made.per_shard_state else (128, 128)
    kept = {key: jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for key, x in made.init(shaped(shape)).items()}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        run = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=(PartitionSpec(), rows))
        total, new = jax.eval_shape(run, jax.ShapeDtypeStruct((4, 128, 128), jnp.float64), kept)
    assert total.dtype == jnp.float64 and all(x.dtype == jnp.float32 for x in new.values())


def shaped(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_ordered_program_adds_nothing_on_the_way():
    text = str(trained("data 4", '"ordered"')[0].traced.jaxpr)
    assert "psum" not in text and "reduce_scatter" not in text


# ---- mutants of the state


def residual_dropped(apply, leaves, states, over):
    return apply(leaves, jax.tree.map(jnp.zeros_like, states), over)


def residual_of_another_replica(apply, leaves, states, over):
    first = lambda x: jax.lax.all_gather(x, over.axes)[0]
    return apply(leaves, jax.tree.map(first, states), over)


def scaled_twice(apply, leaves, states, over):
    return apply([x / over.num for x in leaves], states, over)


@pytest.mark.forms(1)
@pytest.mark.parametrize("change", [residual_dropped, residual_of_another_replica, scaled_twice])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_mutants_are_caught_in_the_sum(name, change, monkeypatch):
    module = __import__(f"spmdkit.communication.reducers.{name}", fromlist=["make"])
    make = module.make

    @functools.wraps(make)
    def instead(**options):
        made = make(**options)
        return dataclasses.replace(made, apply=functools.partial(change, made.apply))

    monkeypatch.setattr(module, "make", instead)
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(applied_and_owed(ROWS[name].at, chosen(name)), true_sum(ROWS[name].at))


def test_owner_residual_mutant_is_caught_in_the_sum(monkeypatch):
    monkeypatch.setattr(coded, "_place_owned_part", lambda part, over: jnp.zeros((over.num, *part.shape)))
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(applied_and_owed("data 4", "bfloat16"), true_sum("data 4"))


# ---- broken ones, as a user writes them

by_psum = functools.partial(check_bytes, row=ROWS["sum"])
BROKEN = {
    "half": (functools.partial(check_sum, mesh="data 4"), "relative errors"),
    "unequal": (functools.partial(check_replicas, mesh="data 4"), "replicas hold other bits"),
    "twice": (by_psum, "comparison failed"),
    "in_parts": (by_psum, "collectives stand in a loop"),
}
"""Reducer of support/own_reducer.py -> what finds it out, and what that says."""


@pytest.mark.parametrize("name", slow_except({"in_parts"}, BROKEN))
def test_a_broken_reducer_fails_the_contract(name):
    check, said = BROKEN[name]
    check("tests.support.own_reducer:right")
    with pytest.raises(AssertionError, match=said):
        check(f"tests.support.own_reducer:{name}")
