"""Adaptive summation against the formula written by hand, on meshes that cut leaves and on those that do not; what it
cannot do is refused."""

import jax
import numpy as np
import optax
import pytest

from spmdkit.communication.reducers import adasum
from spmdkit.communication.reducers.base import ReducedLeaf
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.messages import raises
from tests.support.reducer_runs import alone, program, task, train


def by_hand(a, b):
    """Maleki et al. (2021), equation 4, as Horovod's adasum.h: a gradient without a norm has the factor one."""
    both, of_a, of_b = ((x.astype(np.float64) * y).sum() for x, y in ((a, b), (a, a), (b, b)))
    return (1 - both / (2 * of_a) if of_a else 1) * a + (1 - both / (2 * of_b) if of_b else 1) * b


def tree(terms):
    terms = list(terms)
    while len(terms) > 1:
        terms = [by_hand(a, b) for a, b in zip(terms[0::2], terms[1::2], strict=True)]
    return terms[0]


def run(leaves, num):
    return alone(adasum.make(), num=num)(leaves)[0]


@pytest.mark.parametrize("num", [2, 4])
def test_adasum_is_the_tree_of_the_formula(num):
    random = np.random.default_rng(0)
    leaves = [random.normal(size=(num, *shape)).astype(np.float32) + 0.3 for shape in ((5, 7), (3,), (40, 50))]
    leaves[1][0] = 0
    for found, terms in zip(run(leaves, num), leaves, strict=True):
        np.testing.assert_allclose(found, tree(terms), rtol=2e-5, atol=1e-6)


def test_equal_gradients_are_averaged_and_orthogonal_ones_added():
    same = np.broadcast_to(np.arange(1, 9, dtype=np.float32), (8, 8))
    apart = 3 * np.eye(8, dtype=np.float32)
    averaged, added, nothing = run([same, apart, np.zeros((8, 4), np.float32)], 8)
    np.testing.assert_allclose(averaged, same[0], rtol=1e-6)
    np.testing.assert_allclose(added, np.full(8, 3), rtol=1e-6)
    assert not nothing.any()


MESHES = {
    "replica 2 x data 2, microbatches": {"mesh": {"replica": 2, "data": 2}, "microbatches": 2},
    "data 4 x tensor 2": {"mesh": {"data": 4, "tensor": 2}},
    "replica 2 x data 2 x fsdp 2": {"mesh": {"replica": 2, "data": 2, "fsdp": 2}},
    "fsdp 4 zero 1": {"mesh": {"fsdp": 4}, "layout": {"zero": 1}},
}


@pytest.mark.parametrize("mesh", slow_except({"data 4 x tensor 2"}, MESHES))
def test_step_applies_tree_of_replica_means(mesh):
    made = program(MESHES[mesh], "adasum", task(num=64), data={})
    state, batch = made.init(), next(iter(made.batches(1, 1)))[1]
    params = jax.device_get(state.params)
    rows = jax.device_get(batch.examples)
    found = jax.device_get(made.step(state, batch)[0].opt_state)
    own, gradient = [], jax.jit(jax.grad(_mean))
    for replica in range(4):
        mine = jax.tree.map(lambda x, r=replica: x[16 * r : 16 * (r + 1)], rows)
        own.append(gradient(params, mine))
    expected = {name: tree([np.asarray(g[name]) for g in own]) for name in params}
    assert_close(found, expected)


def _mean(params, rows):
    h = jax.numpy.tanh(rows["x"] @ params["up"])
    error = h @ params["down"] + params["bias"] - rows["y"]
    return ((error**2).sum(-1) * rows["weight"]).sum() / rows["weight"].sum()


@pytest.mark.slow
def test_batch_with_empty_replicas_is_finite():
    state, losses = train(program({"mesh": {"data": 4}}, "adasum", task(optax.sgd(0.01))), 2)
    assert np.isfinite(losses).all() and all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.params))


def test_unsupported_configs_are_rejected_with_reason():
    with raises(
        ("adasum combines replicas in pairs", "'up'"),
        ("data 3", "3 replicas"),
        "not a power of two",
        ("2 replicas, or 4", "reducer: sum"),
    ):
        adasum.make().check([ReducedLeaf("up", (8,), {"data": 3}, ())])
    with raises("needs the mean of each replica", "zero: 2 reduces", "over fsdp before", "{zero: 1}"):
        program("data 2 x fsdp 2 zero 2", "adasum")
