"""`sk.all_gather`, `sk.psum`, `sk.pmean` and the place of a replica in a loss: the same on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmdkit as sk
from spmdkit import compat
from spmdkit.errors import SpmdkitError
from spmdkit.ops import collectives
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, STEPS, assert_same_run, by_hand, keep_gradient, program_of, train

AXES = ("replica", "data")
DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 2, 6)).astype(np.float32)
MESHES = [
    "one device",
    "data 8",
    "replica 2 x data 4",
    "data 2 x fsdp 4",
    "fsdp 8 zero 2",
    "data 2 x fsdp 2 x tensor 2",
]


def init(key):
    return {name: normal(seed, 6, 4) / 2 for seed, name in enumerate("ab")}


def embed(w, rows):
    z = jnp.tanh(rows @ w)
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def clip(own, everybody, mask, labels):
    """Cross entropy of finding the own partner among everybody's."""
    logits = jnp.where(mask, 5 * own @ everybody.T, -jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def by_sk(params, rows, key):
    a, b = embed(params["a"], rows[:, 0]), embed(params["b"], rows[:, 1])
    (all_a, all_b), mask = sk.all_gather((a, b), with_mask=True)
    labels = sk.replica_index() * len(rows) + jnp.arange(len(rows), dtype=jnp.int32)
    center = sk.psum(a.sum(0)) / (sk.num_replicas() * len(rows)) + sk.pmean(b.mean(0))
    losses = clip(a, all_b, mask, labels) + clip(b, all_a, mask, labels) + ((a - center) ** 2).sum(-1)
    return sk.mean(losses), {"center": sk.mean(jnp.sum(center**2)[None].repeat(len(rows)))}


def by_lax(tiled):
    def loss_fn(params, rows, key):
        a, b = embed(params["a"], rows[:, 0]), embed(params["b"], rows[:, 1])
        # What is gathered untiled is [replicas, rows, ...]: of both axes of names, one dim.
        everybody = lambda x: lax.all_gather(x, AXES, tiled=tiled).reshape(-1, 4)
        num = len(rows)
        labels = lax.axis_index(AXES).astype(jnp.int32) * num + jnp.arange(num, dtype=jnp.int32)
        total = lax.all_gather(
            lax.psum_scatter(jnp.stack([a.sum(0)] * sk.num_replicas()), AXES, tiled=tiled), AXES, tiled=tiled
        )
        center = total.reshape(-1, 4)[0] / (lax.psum(1, AXES) * num) + lax.pmean(b.mean(0), AXES)
        losses = clip(a, everybody(b), True, labels) + clip(b, everybody(a), True, labels) + ((a - center) ** 2).sum(-1)
        return sk.mean(losses)

    return loss_fn


def plain(params, rows):
    a, b, labels = embed(params["a"], rows[:, 0]), embed(params["b"], rows[:, 1]), jnp.arange(len(rows))
    center = a.mean(0) + b.mean(0)
    losses = clip(a, b, True, labels) + clip(b, a, True, labels) + ((a - center) ** 2).sum(-1)
    return losses.mean(), {"center": jnp.sum(center**2)}


@functools.cache
def expected_run():
    return by_hand(plain, jax.jit(init)(jax.random.key(0)), DATA, optax.sgd(0.1))


def task_of(loss_fn, mesh="", **more):
    rules = [("[ab]", [None, "mlp"])] if "tensor" in mesh else []
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=DATA, rules=rules, **more)


@pytest.mark.parametrize("mesh", slow_except(["data 2 x fsdp 2 x tensor 2"], MESHES))
def test_loss_over_all_rows_equals_one_device(mesh):
    _, run = train(task_of(by_sk, mesh), mesh)
    assert_same_run(run, expected_run())


@pytest.mark.parametrize("mesh", slow_except(["replica 2 x data 4"], MESHES[:4]))
def test_with_microbatches_all_are_in_the_same(mesh):
    """On every mesh microbatch m has the same rows: the m-th part of the batch."""

    def in_halves(params, rows):
        halves = [plain(params, half) for half in jnp.split(rows, 2)]
        return jax.tree.map(lambda a, b: (a + b) / 2, *halves)

    _, run = train(task_of(by_sk, mesh), mesh, microbatches=2)
    assert_same_run(run, by_hand(in_halves, jax.jit(init)(jax.random.key(0)), DATA, optax.sgd(0.1)))


@pytest.mark.parametrize("mesh", slow_except(["data 2 x fsdp 4"], MESHES[:4]))
def test_loss_of_a_global_step_equals_one_device(mesh):
    def train_step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(by_sk)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss, **metrics}

    _, run = train(dataclasses.replace(task_of(by_sk, mesh), loss_fn=None, train_step=train_step), mesh)
    assert_same_run(run, expected_run())


@pytest.mark.parametrize("mesh", slow_except(["replica 2 x data 4"], ["data 8", "replica 2 x data 4"]))
def test_in_a_per_replica_step_it_is_too(mesh):
    def train_step(state, batch):
        loss_fn = lambda params, rows, key: by_sk(params, rows, key)[0]
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        everybody = sk.all_gather(batch[:, 0, 0])
        own = jax.lax.dynamic_slice_in_dim(everybody, sk.replica_index() * len(batch), len(batch))
        right = sk.pmean((own == batch[:, 0, 0]).all().astype(jnp.float32))
        return state.apply_gradients(grads), {"loss": loss, "right": right}

    task = dataclasses.replace(task_of(by_sk), loss_fn=None, train_step=train_step, view="replica")
    _, run = train(task, mesh)
    expected = expected_run()
    assert_same_run(run, expected._replace(metrics=[{"loss": x} for x in expected.losses]))
    assert all(metrics["right"] == 1 for metrics in run.metrics)


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    ("mesh", "tiled"),
    [("replica 2 x data 4", False), ("one device", True), ("data 8", True), ("data 2 x fsdp 4", False)],
)
def test_lax_collectives_over_axis_tuples_equal_one_device(mesh, tiled):
    _, run = train(task_of(by_lax(tiled)), mesh)
    expected = expected_run()
    assert_same_run(run, expected._replace(metrics=[{"loss": x} for x in expected.losses]))


@pytest.mark.forms(2)
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mapped", [(0, 0), (1, 2), (None, 1)])
def test_vmap_gather_and_scatter_equal_shard_map(tiled, dim, mapped):
    """Wherever the mapped dims lie, and where one of them is not mapped at all."""
    compat.add_multi_axis_vmap_rules()
    outer, inner = mapped
    whole = np.random.default_rng(1).normal(size=(2, 3, 6, 6)).astype(np.float32)
    if outer is None:
        whole = np.broadcast_to(whole[:1], whole.shape)

    def body(x):
        gathered = lax.all_gather(x, ("r", "d"), axis=dim, tiled=tiled)
        return gathered, lax.psum_scatter(x, ("r", "d"), scatter_dimension=dim, tiled=tiled)

    given = np.moveaxis(whole, 1, 1 + inner)
    given = given[0] if outer is None else np.moveaxis(given, 0, outer)
    mapped = jax.vmap(jax.vmap(body, inner, axis_name="d"), outer, axis_name="r", axis_size=2)
    found = jax.device_get(jax.jit(mapped)(given))
    parts = whole.reshape(6, 6, 6)
    gathered = np.concatenate(parts, dim) if tiled else np.stack(parts, dim)
    scattered = np.split(parts.sum(0), 6, dim)
    for part in range(6):
        np.testing.assert_array_equal(found[0].reshape(6, *gathered.shape)[part], gathered)
        own = scattered[part] if tiled else scattered[part].squeeze(dim)
        np.testing.assert_allclose(found[1].reshape(6, *own.shape)[part], own, atol=1e-5)


# ---- padding


def test_padding_is_not_among_everybodys_rows():
    """37 rows in batches of 16: the last one of the evaluation has 5."""
    task = sk.Task(init, by_sk, keep_gradient(optax.sgd(0.1)), train_data=DATA[:40], eval_data=DATA[:37])
    short = {"data": {"shuffle": False, "drop_remainder": False}}
    program = program_of(without_center(task), "data 8", **short)
    state = program.init()
    params = jax.device_get(state.params)
    rows = [DATA[:16], DATA[16:32], DATA[32:37]]
    by_rows = np.concatenate([np.full(len(x), losses_alone(params, x)) for x in rows])
    np.testing.assert_allclose(program.eval(state)["loss"], by_rows.mean(), rtol=1e-5)


def negatives_alone(params, rows, key):
    a, b = embed(params["a"], rows[:, 0]), embed(params["b"], rows[:, 1])
    everybody, mask = sk.all_gather(b, with_mask=True)
    labels = sk.replica_index() * len(rows) + jnp.arange(len(rows), dtype=jnp.int32)
    return sk.mean(clip(a, everybody, mask, labels))


@jax.jit
def losses_alone(params, rows):
    a, b = embed(params["a"], rows[:, 0]), embed(params["b"], rows[:, 1])
    return clip(a, b, True, jnp.arange(len(rows))).mean()


def without_center(task):
    return dataclasses.replace(task, loss_fn=negatives_alone)


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    slow_except([("replica 2 x data 4", 2)], [("data 8", 1), ("data 2 x fsdp 4", 1), ("replica 2 x data 4", 2)]),
)
def test_its_gradient_is_that_of_the_real_rows(mesh, microbatches):
    """The last batch has 8 rows, which are those of its first microbatch: the second one is empty."""

    def of_rows(params, rows):
        parts = [rows] if microbatches == 1 else [part for part in (rows[:8], rows[8:]) if len(part)]
        return sum(losses_alone(params, part) for part in parts) / len(parts), {}

    task = without_center(dataclasses.replace(task_of(by_sk), train_data=DATA[:40]))
    _, run = train(task, mesh, microbatches=microbatches, data={"shuffle": False, "drop_remainder": False})
    assert_same_run(run, by_hand(of_rows, jax.jit(init)(jax.random.key(0)), DATA[:40], optax.sgd(0.1)))


def unmasked(params, rows, key):
    return sk.mean(sk.all_gather(rows[:, 0, 0]).sum() * embed(params["a"], rows[:, 0]).sum(-1))


def test_gather_without_mask_is_rejected_with_short_batches():
    with pytest.raises(SpmdkitError, match="with_mask=True"):
        program_of(task_of(unmasked), "data 8", data={"drop_remainder": False}, batch_size=32)


# ---- where nothing can cross


def in_a_step(state, batch):
    return state, {"loss": sk.all_gather(batch[:, 0, 0]).mean()}


OF_PARTS = {
    "all_gather": lambda x: collectives.all_gather(x, "batch", dim=0),
    "all_reduce": lambda x: collectives.all_reduce(x, "batch"),
    "reduce_scatter": lambda x: collectives.reduce_scatter(x, ("batch", "mlp"), dim=0),
    "all_to_all": lambda x: collectives.all_to_all(x, "mlp", 0, 1),
    "ring_shift": lambda x: collectives.ring_shift(x, "sequence"),
    "axis_index": lambda x: x * collectives.axis_index("batch"),
    "axis_size": lambda x: x / collectives.axis_size("batch"),
}


def of_parts(name):
    return lambda params, rows, key: sk.mean(OF_PARTS[name](embed(params["a"], rows[:, 0])).sum(-1))


def in_a_part(params, rows, key):
    part = sk.manual(lambda x: sk.all_gather(x).sum(0, keepdims=True) + x, [("batch", None)], ("batch", None))
    return sk.mean(part(embed(params["a"], rows[:, 0])).sum(-1))


def of_a_scalar(params, rows, key):
    return sk.mean(rows[:, 0, 0] * sk.all_gather(params["a"].sum())[0])


@pytest.mark.parametrize(
    ("task", "mesh", "said"),
    [
        (
            sk.Task(init, train_step=in_a_step, optimizer=optax.sgd(0.1), train_data=DATA),
            "data 8",
            "In the global view",
        ),
        (task_of(in_a_part), "one device", "sk.all_gather was called inside sk.manual.*before or after the part"),
        (task_of(in_a_part), "data 2 x fsdp 4", "sk.all_gather was called inside sk.manual"),
        (task_of(of_a_scalar), "data 8", "x\\[None\\]"),
    ],
)
def test_what_would_cross_nothing_is_refused(task, mesh, said):
    with pytest.raises(SpmdkitError, match=said):
        program_of(task, mesh)


@pytest.mark.parametrize("name", OF_PARTS)
def test_collective_is_rejected_where_arrays_are_global(name):
    with pytest.raises(
        SpmdkitError, match=f"{name} over .* outside of sk.manual, on a mesh of 8 devices.*sk.num_replicas"
    ):
        program_of(task_of(of_parts(name)), "data 8")


def test_every_collective_of_parts_is_among_them():
    public = {n for n, f in vars(collectives).items() if getattr(f, "__module__", "") == collectives.__name__}
    assert {n for n in public if not n.startswith("_")} == {*OF_PARTS, "axes"}


def test_loss_called_manually_is_one_replica():
    with sk.examples(3):
        rows, mask = sk.all_gather(jnp.arange(3), with_mask=True)
        assert (sk.num_replicas(), int(sk.replica_index()), float(sk.psum(jnp.float32(2)))) == (1, 0, 2.0)
    assert rows.tolist() == [0, 1, 2]
    assert mask.tolist() == [True, True, True]
