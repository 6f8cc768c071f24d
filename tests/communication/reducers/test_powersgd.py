"""Factors of matrices: what they hold, the warm start, which leaves are matrices, the paper's figures, messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.communication.reducers import powersgd
from spmdkit.communication.reducers.base import ReducedLeaf
from tests.support.messages import raises
from tests.support.reducer_runs import alone, program, task


def reduction(made, path="w"):
    """Returns `(terms [4, *leaf], state) -> (sum, new state)`."""
    run = alone(made, path)

    def reduce(terms, state):
        (total,), (new,) = run([terms], [state])
        return total, new

    return reduce


def zeros(made, terms):
    shapes = made.init(jax.ShapeDtypeStruct(terms.shape[1:], jnp.float32))
    return {name: np.zeros((4, *x.shape), np.float32) for name, x in shapes.items()}


def of_rank(random, rank, *shape):
    """Returns [4, *shape] whose sum over the first dim is, matrix by matrix, of this rank."""
    terms = random.normal(size=(4, *shape)).astype(np.float32)
    u, s, v = np.linalg.svd(terms.sum(0), full_matrices=False)
    terms[3] += (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :] - terms.sum(0)
    return terms


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_low_rank_sums_and_stacked_matrices_are_exact(warm):
    terms = of_rank(np.random.default_rng(0), 2, 3, 48, 32)
    made = powersgd.make(rank=2, warm_start=warm)
    total, new = reduction(made, "blocks/w")(terms, zeros(made, terms))
    np.testing.assert_allclose(total, terms.sum(0), atol=1e-4)
    np.testing.assert_allclose(np.asarray(new["error"]).sum(0), 0, atol=1e-4)
    assert np.abs(new["error"]).max() > 1e-2, "what one replica owes, another has paid too much"


def one_by_one(steps, q):
    """Returns (sums, owed) of PowerSGD in NumPy, one matrix after the other: algorithms 1 and 2 of Vogels et al.
    (2019), `Q` the last step's right factor.

    Args:
        steps: terms of each step, [4, matrices, m, n]; a replica's own in the first dim.
        q: where each matrix begins, [matrices, n, rank].
    """
    residuals, sums = np.zeros(steps[0].shape), []
    for terms in steps:
        total = np.zeros(terms.shape[1:])
        for b in range(terms.shape[1]):
            own = terms[:, b] + residuals[:, b]
            p, _ = np.linalg.qr(sum(c @ np.linalg.qr(q[b])[0] for c in own))
            right = sum(c.T @ p for c in own)
            total[b], residuals[:, b], q[b] = p @ right.T, own - p @ (p.T @ own), right
        sums.append(total)
    return sums, residuals


@pytest.mark.parametrize(
    "path, shape, view",
    [
        ("up", (3, 48, 32), (1, 144, 32)),
        ("blocks/query", (2, 4, 12, 40), (2, 48, 40)),  # heads belong to the matrix of their layer
    ],
)
def test_first_dim_of_stacked_leaf_is_a_batch(path, shape, view):
    random, rank = np.random.default_rng(0), 3
    steps = [random.normal(size=(4, *shape)).astype(np.float32) for _ in range(3)]
    made = powersgd.make(rank=rank)
    run, states, totals = reduction(made, path), zeros(made, steps[0]), []
    for terms in steps:
        total, states = run(terms, states)
        totals.append(total)
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), 0)
    start = np.asarray(jax.random.normal(key, (view[0], view[2], rank)), np.float64)
    sums, residuals = one_by_one([terms.reshape(4, *view) for terms in steps], start.copy())
    for found, expected in zip(totals, sums, strict=True):
        np.testing.assert_allclose(found, expected.reshape(shape), atol=2e-4)
    np.testing.assert_allclose(states["error"], residuals.reshape(4, *shape), atol=2e-4)


def test_leaf_is_split_where_factors_are_smallest():
    assert powersgd.matrices((128, 4, 32), 4, False, 1) == (1, 128, 128)
    assert powersgd.matrices((3, 3, 64, 128), 4, False, 1) == (1, 576, 128)
    assert powersgd.matrices((6, 128, 512), 4, True, 1) == (6, 128, 512)
    assert powersgd.matrices((128,), 4, False, 1) is None
    assert powersgd.matrices((128, 4), 4, False, 1) is None
    assert powersgd.matrices((128, 4), 4, False, 0) == (1, 128, 4)
    sent = lambda path: powersgd.make().bytes_sent([ReducedLeaf(path, (6, 128, 512), {"data": 4}, ())])
    batch, one = 6 * 4 * 6 * (128 + 512), 6 * 4 * (6 * 128 + 512)
    assert [sent(path) for path in ("blocks/up", "a/layers/up", "blocks/0/up", "up")] == [batch, batch, one, one]


@pytest.mark.parametrize("deficient", [False, True])
def test_columns_become_orthonormal_and_lost_ones_are_replaced(deficient):
    x = np.random.default_rng(0).normal(size=(3, 40, 6)).astype(np.float32)
    if deficient:
        x[:, :, 3], x[1, :, 5] = x[:, :, 0] - x[:, :, 1], 0
    found = np.asarray(jax.jit(lambda x: powersgd.orthonormal(x, 0))(x), np.float64)
    np.testing.assert_allclose(
        np.einsum("bnr,bns->brs", found, found), np.broadcast_to(np.eye(6), (3, 6, 6)), atol=1e-6
    )
    np.testing.assert_allclose(found @ np.swapaxes(found, 1, 2) @ x, x, atol=1e-5)


def test_warm_start_converges_to_best_rank():
    random = np.random.default_rng(0)
    u, _ = np.linalg.qr(random.normal(size=(64, 64)))
    v, _ = np.linalg.qr(random.normal(size=(48, 48)))
    whole = (u[:, :48] * 0.9 ** np.arange(48)) @ v
    best = np.sqrt(((0.9 ** np.arange(4, 48)) ** 2).sum())
    terms = np.broadcast_to(whole / 4, (4, 64, 48)).astype(np.float32)
    found = {}
    for warm in (True, False):
        made = powersgd.make(rank=4, warm_start=warm)
        states, run = zeros(made, terms), reduction(made)
        for _ in range(12):
            total, states = run(terms, states | {"error": np.zeros_like(terms)})
        found[warm] = np.linalg.norm(np.asarray(total) - whole) / best
    assert found[True] == pytest.approx(1, abs=2e-3) and found[False] > 1.05


def test_product_is_kept_on_another_number_of_replicas():
    state = {"error": jnp.arange(8.0).reshape(2, 2, 2), "product": jnp.ones((2, 2, 2))}
    found = powersgd.make().reshard_state(state, 4)
    assert (found["product"].shape, found["error"].shape) == ((4, 2, 2), (4, 2, 2))
    assert (np.asarray(found["product"]) == 1).all()
    np.testing.assert_allclose(found["error"].sum(0), state["error"].sum(0))


def resnet18():
    """Returns path -> shape of the gradient of ResNet-18 as it is trained on CIFAR-10: 3 x 3 convolutions, batch norms,
    one dense layer."""
    shapes, width_in = {"conv": (3, 3, 3, 64), "norm": (2 * 64,)}, 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"{stage}.{block}"
            shapes |= {f"conv{name}a": (3, 3, width_in, width), f"conv{name}b": (3, 3, width, width)}
            shapes[f"norm{name}"] = (4 * width,)
            if width_in != width:
                shapes |= {f"conv{name}short": (1, 1, width_in, width), f"norm{name}short": (2 * width,)}
            width_in = width
    return shapes | {"dense": (512, 10), "bias": (10,)}


def test_the_formula_gives_the_papers_compression_of_resnet18():
    """Vogels et al. (2019), table 3: sent per epoch and how many times less than SGD's 1,023 MB; appendix F: 43 MB, 38
    KB of vectors."""
    leaves = [ReducedLeaf(path, shape, {"data": 16}, ()) for path, shape in resnet18().items()]
    values = sum(leaf.size for leaf in leaves)
    vectors = sum(leaf.size for leaf in leaves if len(leaf.shape) == 1)
    assert (round(values * 4 / 2**20), round(vectors * 4 / 2**10)) == (43, 38)
    plain = 2 * 15 / 16 * 4 * values
    for rank, times, megabytes in ((1, 243, 4), (2, 136, 8), (4, 72, 14)):
        sent = powersgd.make(rank=rank).bytes_sent(leaves)
        assert round(plain / sent) == times
        assert round(1023 * sent / plain) == megabytes


def test_a_model_without_a_large_matrix_is_refused():
    small = task(init=lambda key: {"up": jnp.ones((128, 6)), "down": jnp.ones((6, 8)), "bias": jnp.zeros(8)}, rules=[])
    with raises("powersgd with rank: 8", ("'up'", "[128, 6]"), "no leaf of the gradient", "reducer: int8"):
        program("data 8", {"powersgd": {"rank": 8}}, small)


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"rank": 0}, ("powersgd.rank is 0", "at least 1", "Write rank: 4")),
        ({"rank": 2.0}, ("powersgd.rank is 2.0",)),
        ({"least": -1}, ("powersgd.least is -1", "Write least: 1")),
        ({"stacked": "blocks"}, ("powersgd.stacked is 'blocks'", "a list of patterns")),
        ({"stacked": ["blocks("]}, ("'blocks(' is not a valid pattern", "whole path")),
    ],
    ids=str,
)
def test_options_that_are_none_are_refused(options, parts):
    with raises(parts):
        sk.Config(task="t.py:t", reducer={"powersgd": options})
