"""Every file in spmdkit/reducers keeps the contract of `reducers.base`. A new reducer is a file there and a row here."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdkit import kinds
from spmdkit.plan.bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.reducers import bfloat16
from spmdkit.reducers.base import stateless
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close
from tests.support.reducer_runs import MESHES, NUM_VALUES, applied_and_owed, program, task, train, true_sum


class Row(NamedTuple):
    """What is special about a reducer.

    Attributes:
        kinds: of the collectives that carry the gradient over replicas.
        owner: for those that round a second time on the owner of a part: a context in which the owner forgets what it took.
    """

    kinds: frozenset[str]
    owner: object = None


def forgetful_owner(monkeypatch):
    monkeypatch.setattr(bfloat16, "_on_owner", lambda part, over: jnp.zeros((over.num, *part.shape)))


ROWS = {
    "sum": Row(frozenset({"all_reduce"})),
    "ordered": Row(frozenset({"all_to_all", "all_gather"})),
    "bfloat16": Row(frozenset({"all_to_all", "all_gather"}), forgetful_owner),
}

INEXACT = [name for name in ROWS if not kinds.make("reducers", name).exact]
STATEFUL = [name for name in ROWS if kinds.make("reducers", name).init is not stateless]


def test_every_reducer_has_a_row():
    assert kinds.names("reducers") == sorted(ROWS)


def lossless(name):
    """Returns the choice of a reducer at which its result equals the sum."""
    options = kinds.make("reducers", name).lossless
    return {name: dict(options)} if options else name


@functools.cache
def trained(mesh, reducer="sum"):
    """Returns a program of Adam and its state after 4 steps."""
    made = program(mesh, {reducer[0]: dict(reducer[1:])} if isinstance(reducer, tuple) else reducer, adam())
    return made, train(made, 4)


def adam():
    return task(optax.adam(1e-2, eps=1e-3))


def hashable(choice):
    return choice if isinstance(choice, str) else (*choice, *next(iter(choice.values())).items())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "sum"])
def test_a_run_at_lossless_options_equals_that_of_the_sum(name, mesh):
    reducer = kinds.make("reducers", name)
    assert reducer.exact or reducer.lossless, "an inexact reducer has options at which it is the sum"
    _, (expected, losses) = trained(mesh)
    _, (state, found) = trained(mesh, hashable(lossless(name)))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ROWS)
def test_replicas_hold_the_same_bits_and_the_form_is_that_of_the_sum(name, mesh):
    made, (state, _) = trained(mesh, name)
    assert made.form == trained(mesh)[0].form
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(bits) == 1 for bits in by_index.values())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", STATEFUL)
def test_what_was_applied_and_what_is_owed_add_up_to_the_true_sum(name, mesh):
    assert_close(applied_and_owed(mesh, name), true_sum(mesh))


# ---- mutants of the state -----------------------------------------------------------------------------------------------


def wrong(name, monkeypatch, change):
    """Puts `change(apply, leaves, states, over)` in the place of a reducer's `apply`."""
    module = __import__(f"spmdkit.reducers.{name}", fromlist=["make"])
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


@pytest.mark.parametrize("change", [residual_dropped, residual_of_another_replica, scaled_twice])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_mistake_with_the_state_is_seen_in_the_sum(name, change, monkeypatch):
    wrong(name, monkeypatch, change)
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(applied_and_owed("data 8", name), true_sum("data 8"))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.owner])
def test_the_owners_share_of_what_is_owed_is_seen_in_the_sum(name, monkeypatch):
    ROWS[name].owner(monkeypatch)
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(applied_and_owed("data 8", name), true_sum("data 8"))


# ---- on the wire --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ROWS)
def test_the_bytes_on_the_wire_are_those_of_the_formula_and_none_are_in_a_loop(name, microbatches):
    made = program({"mesh": {"data": 8}}, name, wide(), batch_size=64, microbatches=microbatches, data={})
    bill = read_bill(parse(made.compiled.as_text()), made.sizes)
    large = [c for c in bill.collectives if c.bytes > 4096]
    assert not any(c.in_loop for c in bill.collectives if "data" in c.axes)
    assert {c.op for c in large} == ROWS[name].kinds
    assert sum(c.bytes for c in large) == pytest.approx(kinds.make("reducers", name).wire(NUM_VALUES, 8), rel=2e-3)


def wide():
    """Returns a task whose parameters are one leaf of NUM_VALUES."""
    import spmdkit as sk

    return task(
        num=64,
        loss_fn=lambda params, batch, key: sk.mean(((batch["x"] @ params["up"]) ** 2).sum(-1)),
        rules=[],
        init=lambda key: {"up": jax.random.normal(key, (128, 128))},
    )


@pytest.mark.parametrize("mesh", ["data 8", "replica 2 x data 4"])
def test_nothing_of_the_ordered_reducers_program_adds_on_the_way(mesh):
    made, _ = trained(mesh, "ordered")
    assert "psum" not in str(made.traced.jaxpr) and "reduce_scatter" not in str(made.traced.jaxpr)
    assert not [
        c for c in collectives(made.compiled.as_text(), made.sizes) if c.kind.startswith(("all-reduce", "reduce"))
    ]
