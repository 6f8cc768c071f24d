"""Every file in spmdkit/communication/reducers keeps the contract of `reducers.base`. A new reducer is a file there and
a row here."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdkit.communication.reducers import coded
from spmdkit.communication.reducers.base import ReducedLeaf, stateless
from spmdkit.foundation import plugins
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close
from tests.support.reducer_runs import MESHES, applied_and_owed, program, task, train, true_sum


class Row(NamedTuple):
    """What is special about a reducer.

    Attributes:
        kinds: of the collectives that carry the gradient over replicas.
        owner: for those that round a second time on the owner of a part: a context in which the owner forgets what it
            took.
        options: with which it is run here, where its own are not for a model this small.
        meshes: on which it is run by default; others only in the thorough form.
        like: another reducer of the same exchange, or with tests of its own: its mutants and all numbers of replicas
            are run there, here in the thorough form.
        at: the mesh on which its mutants are run.
        never: meshes on which it is refused.
        rounds: what carries the gradient stands in a loop, whose runs only the gradient knows: the formula is that of
            one.
    """

    kinds: frozenset[str]
    owner: object = None
    options: tuple[tuple[str, object], ...] = ()
    meshes: tuple[str, ...] = tuple(MESHES)
    like: str = ""
    at: str = "data 8"
    never: tuple[str, ...] = ()
    rounds: bool = False


def forgetful_owner(monkeypatch):
    monkeypatch.setattr(coded, "_place_owned_part", lambda part, over: jnp.zeros((over.num, *part.shape)))


BY_OWNERS = frozenset({"all_to_all", "all_gather"})
SHORT = ("data 8", "replica 2 x fsdp 2 x tensor 2")

ROWS = {
    "sum": Row(frozenset({"all_reduce"})),
    "ordered": Row(BY_OWNERS, meshes=SHORT),
    "bfloat16": Row(BY_OWNERS, forgetful_owner, meshes=(*SHORT, "fsdp 8 zero 1")),
    "float8": Row(BY_OWNERS, forgetful_owner, meshes=("data 8",), like="int8"),
    "sign": Row(BY_OWNERS, forgetful_owner, meshes=("data 8",), like="int8"),
    "adasum": Row(BY_OWNERS, meshes=("data 8",), never=("data 2 x fsdp 4 zero 2",)),
    "powersgd": Row(frozenset({"all_reduce"}), meshes=SHORT),
    "topk": Row(
        frozenset({"all_gather"}),
        options=(("fraction", 0.25), ("most", None)),
        meshes=SHORT,
    ),
    "sparse_rows": Row(
        frozenset({"all_gather"}),
        options=(("leaves", ["up"]), ("rows", 48), ("most", None)),
        meshes=("data 8",),
        like="sum",
        rounds=True,
    ),
    "hierarchical": Row(
        BY_OWNERS,
        forgetful_owner,
        meshes=("replica 2 x data 4",),
        at="replica 2 x data 4",
        never=("data 8", "replica 2 x fsdp 2 x tensor 2", "fsdp 8 zero 1", "data 2 x fsdp 4 zero 2"),
    ),
    "int8": Row(BY_OWNERS, forgetful_owner, meshes=("data 8", "data 2 x fsdp 4 zero 2")),
}


def test_every_reducer_has_a_row():
    assert plugins.names("reducers") == sorted(ROWS)


def on_meshes(names, most=None):
    """Returns (name, mesh) of reducers; those beyond the last `most` default meshes of a reducer are slow."""
    return [
        pytest.param(name, mesh, marks=() if mesh in ROWS[name].meshes[-(most or 0) :] else pytest.mark.slow)
        for name in names
        for mesh in MESHES
        if mesh not in ROWS[name].never
    ]


def once_of_each(names):
    """Returns reducers, those marked whose exchange another one has."""
    return [pytest.param(name, marks=pytest.mark.slow if ROWS[name].like else ()) for name in names]


def chosen(name, **more):
    """Returns the choice of a reducer with the options of its row, and more."""
    options = dict(ROWS[name].options) | more
    return {name: options} if options else name


def lossless(name):
    """Returns the choice of a reducer at which its result equals the sum."""
    return chosen(name, **(plugins.make("reducers", chosen(name)).exact_options or {}))


@pytest.mark.parametrize("name", ROWS)
def test_float64_gradient_is_reduced_without_promotion(name):
    """Traced alone: a sum of float64 and of what is owed in float32, or of integers of two sizes, would be refused."""
    wide = {"params": "float64", "compute": "float64", "inputs": "compute"}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        traced = program(ROWS[name].at, chosen(name), precision=wide)
        state, _, _ = traced.traced.out_info
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float64")}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.reducer))


STATEFUL = [name for name in ROWS if plugins.make("reducers", chosen(name)).init is not stateless]


@functools.cache
def trained(mesh, reducer='"sum"'):
    """Returns a program of Adam and its state after 4 steps; the reducer is JSON."""
    made = program(mesh, json.loads(reducer), adam())
    return made, train(made, 4)


def adam():
    return task(optax.adam(1e-2, eps=1e-3))


ANOTHER_SUM = {"adasum"}
"""What is no sum at any options: equal to its own formula, tests/communication/reducers/test_adasum.py."""


def check_lossless(lossless, mesh):
    """Fails unless a run with this reducer, at options at which it is exact, is that of the sum."""
    _, (expected, losses) = trained(mesh)
    _, (state, found) = trained(mesh, json.dumps(lossless))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_close(state.params, expected.params)


def check_replicas(choice, mesh):
    """Fails unless all replicas hold the same bits after some steps, in the form of the step that the sum has."""
    made, (state, _) = trained(mesh, json.dumps(choice))
    assert made.form == trained(mesh)[0].form
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(bits) == 1 for bits in by_index.values()), "replicas hold other bits"


@pytest.mark.parametrize("name, mesh", on_meshes([name for name in ROWS if name not in {"sum", *ANOTHER_SUM}], most=1))
def test_exact_options_equal_sum(name, mesh):
    reducer = plugins.make("reducers", chosen(name))
    assert reducer.exact or reducer.exact_options, "an inexact reducer has options at which it is the sum"
    check_lossless(lossless(name), mesh)


@pytest.mark.parametrize("name, mesh", on_meshes(ROWS))
def test_replicas_are_bitwise_equal_in_sums_form(name, mesh):
    check_replicas(chosen(name), mesh)


@pytest.mark.parametrize("name, mesh", on_meshes(STATEFUL, most=1))
def test_applied_and_residual_add_up_to_true_sum(name, mesh):
    assert_close(applied_and_owed(mesh, chosen(name)), true_sum(mesh))


# ---- mutants of the state
# -----------------------------------------------------------------------------------------------


def wrong(name, monkeypatch, change):
    """Puts `change(apply, leaves, states, over)` in the place of a reducer's `apply`."""
    module = __import__(f"spmdkit.communication.reducers.{name}", fromlist=["make"])
    make = module.make

    @functools.wraps(make)
    def instead(**options):
        made = make(**options)
        return dataclasses.replace(made, apply=functools.partial(change, made.apply))

    monkeypatch.setattr(module, "make", instead)


def residual_dropped(apply, leaves, states, over):
    return apply(leaves, jax.tree.map(jnp.zeros_like, states), over)


def residual_of_another_replica(apply, leaves, states, over):
    first = lambda x: jax.lax.all_gather(x, over.axes)[0]
    return apply(leaves, jax.tree.map(first, states), over)


def scaled_twice(apply, leaves, states, over):
    return apply([x / over.num for x in leaves], states, over)


@pytest.mark.forms(6)
@pytest.mark.parametrize("change", [residual_dropped, residual_of_another_replica, scaled_twice])
@pytest.mark.parametrize("name", once_of_each(STATEFUL))
def test_state_mutants_are_caught_in_the_sum(name, change, monkeypatch):
    wrong(name, monkeypatch, change)
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(applied_and_owed(ROWS[name].at, chosen(name)), true_sum(ROWS[name].at))


@pytest.mark.parametrize("name", once_of_each(name for name, row in ROWS.items() if row.owner))
def test_owner_residual_mutant_is_caught_in_the_sum(name, monkeypatch):
    ROWS[name].owner(monkeypatch)
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(applied_and_owed(ROWS[name].at, chosen(name)), true_sum(ROWS[name].at))


# ---- on the wire


@pytest.mark.parametrize(
    "name, num, microbatches",
    [
        pytest.param(name, num, micro, marks=pytest.mark.slow if row.like and (num, micro) != (8, 4) else ())
        for name, row in ROWS.items()
        if row.at == "data 8"
        for num, micro in ((2, 1), (4, 1), (8, 1), (8, 4))
    ],
)
def test_bytes_match_formula_outside_of_loops(name, num, microbatches):
    check_wire(chosen(name), num, microbatches, ROWS[name])


def check_wire(choice, num, microbatches, row):
    """Fails unless a compiled step sends the bytes of the reducer's formula, by the collectives of its row, after its
    last microbatch."""
    made = program({"mesh": {"data": num}}, choice, wide(), batch_size=64, microbatches=microbatches, data={})
    bill = read_bill(parse(made.compiled.as_text()), made.sizes)
    large = [c for c in bill.collectives if c.bytes_at_least > 1024]
    in_loop = [c.in_loop for c in (large if row.rounds else bill.collectives)]
    assert all(in_loop) if row.rounds else not any(in_loop), (
        f"{sum(in_loop)} of {len(in_loop)} collectives stand in a loop"
    )
    assert {c.op for c in large} == row.kinds
    expected = made.reducer.bytes_sent([ReducedLeaf("up", (128, 128), {"data": num}, ())])
    assert sum(c.bytes_at_least for c in large) == pytest.approx(
        expected, rel=2e-3, abs=32
    )  # the loss may travel along


def wide():
    """Returns a task whose parameters are one leaf of 128 x 128."""
    import spmdkit as sk

    return task(
        num=64,
        loss_fn=lambda params, batch, key: sk.mean(((batch["x"] @ params["up"]) ** 2).sum(-1)),
        rules=[],
        init=lambda key: {"up": jax.random.normal(key, (128, 128))},
    )


@pytest.mark.parametrize("mesh", ["data 8", "replica 2 x data 4"])
def test_ordered_program_adds_nothing_on_the_way(mesh):
    made, _ = trained(mesh, '"ordered"')
    assert "psum" not in str(made.traced.jaxpr) and "reduce_scatter" not in str(made.traced.jaxpr)
    assert not [
        c for c in collectives(made.compiled.as_text(), made.sizes) if c.kind.startswith(("all-reduce", "reduce"))
    ]


# ---- broken ones, as a user writes them
# -----------------------------------------------------------------------------------

by_psum = functools.partial(check_wire, num=2, microbatches=1, row=Row(frozenset({"all_reduce"})))
BROKEN = {
    "half": (functools.partial(check_lossless, mesh="data 8"), "relative errors|Not equal"),
    "unequal": (functools.partial(check_replicas, mesh="data 8"), "replicas hold other bits"),
    "twice": (by_psum, "comparison failed"),
    "in_parts": (by_psum, "collectives stand in a loop"),
}
"""Reducer of support/own_reducer.py -> what finds it out, and what that says."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reducer_fails_the_contract(name):
    check, said = BROKEN[name]
    check("tests.support.own_reducer:right")
    with pytest.raises(AssertionError, match=said):
        check(f"tests.support.own_reducer:{name}")
