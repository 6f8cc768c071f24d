"""Buckets of lengths: batches of one bucket, shortened to its boundary, with one program each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.data import Bucket, Schedule
from spmdkit.errors import ConfigError, Preempted
from tests.support import small_runs
from tests.support.core_runs import program_of
from tests.support.forms import slow_except

MESHES = [{"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}]
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, 13, 90)
TOKENS = np.where(np.arange(12) < LENGTHS[:, None], RANDOM.integers(1, 50, (90, 12)), 0).astype(np.int32)
BUCKETS = {"bucket_boundaries": [3, 6, 12], "bucket_by": "length"}


def init(key):
    return {"embed": 0.3 * jax.random.normal(key, (50, 8)), "out": 0.3 * jax.random.normal(key, (8, 50))}


def loss_fn(params, batch, key):
    """Predicts the next token of the text so far. Padding has weight 0."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    h = jnp.cumsum(params["embed"][inputs], 1) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(h, targets)
    width = jnp.full(len(targets), batch["tokens"].shape[1])
    return sk.mean(losses, weights=targets > 0), {"width": sk.max(width), "ids": sk.sum(batch["id"])}


DATA = {"tokens": TOKENS, "length": LENGTHS.astype(np.int32), "id": np.arange(90, dtype=np.int32)}
TASK = sk.Task(init, loss_fn, optax.adam(0.01), train_data=DATA)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_remainder", [True, False])
def test_a_batch_has_one_bucket_and_an_epoch_each_example_once(drop_remainder, shuffle):
    bucket_of = RANDOM.integers(0, 3, 500)
    buckets = tuple(Bucket(4 * (i + 1), np.flatnonzero(bucket_of == i)) for i in range(3))
    schedule = Schedule(500, 16, 3, shuffle=shuffle, drop_remainder=drop_remainder, buckets=buckets)
    num, orders = schedule.steps_per_epoch, []
    for epoch in range(3):
        seen, order = [], []
        for step in range(epoch * num + 1, (epoch + 1) * num + 1):
            indices, mask = schedule.batch(step)
            [bucket] = set(bucket_of[indices])
            assert schedule.epoch(step) == epoch and schedule.length(step) == 4 * (bucket + 1)
            seen, order = [*seen, *indices[mask]], [*order, bucket]
        assert (
            len(set(seen)) == len(seen) == (sum(len(b.examples) // 16 * 16 for b in buckets) if drop_remainder else 500)
        )
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1]) and (orders[0] != orders[1]) == shuffle
    assert schedule.steps_of(3) == 3 * num


def trained(mesh, steps=12, task=TASK, **settings):
    program = program_of(task, mesh=mesh, data=BUCKETS, batch_size=8, steps=steps, **settings)
    state, found = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        found.append({name: float(x) for name, x in metrics.items()})
    return jax.device_get(state.params), found, program


@pytest.mark.parametrize("mesh", slow_except(MESHES[2:], MESHES))
def test_buckets_are_those_of_one_device(mesh):
    params, metrics, _ = trained({})
    of_mesh, found, program = trained(mesh, microbatches=2)
    assert {x["width"] for x in metrics} == {3, 6, 12} and [*program.other_shapes()] == ["length 3", "length 6"]
    for one, other in zip(metrics, found, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), of_mesh, params)


def test_a_bucket_gives_the_loss_of_whole_rows():
    _, metrics, program = trained({}, steps=3)
    params = program.init().params

    @jax.jit
    def loss(rows):
        with sk.examples(8):
            return loss_fn(params, rows, None)[0].value

    for step in range(1, 4):
        indices, _ = program.schedule.batch(step)
        rows = {name: x[indices] for name, x in DATA.items()}
        short = program.feed.read(step).examples
        assert short["tokens"].shape[1] == metrics[step - 1]["width"] >= rows["length"].max()
        np.testing.assert_allclose(loss(rows), loss(short), rtol=1e-6)


def test_a_run_with_buckets_continues_bitwise(tmp_path):
    class Rows:
        """Examples that are read one by one."""

        def __len__(self):
            return 90

        def __getitem__(self, i):
            return {name: x[i] for name, x in DATA.items()}

    def train(folder, data=DATA, stop=None):
        hook = sk.Hook("stop", after_step=lambda run, step, *_: sk.Stop(42, "test") if step == stop else None)
        task = dataclasses.replace(TASK, hooks=[hook], train_data=data)
        settings = {"steps": 14, "batch_size": 8, "data": BUCKETS, "log": {"every_steps": 1}}
        sk.train(small_runs.config_of(folder, **settings), task=task)
        return [(x["loss"], x["ids"], x["epoch"]) for x in small_runs.lines(folder, "metrics.jsonl")]

    whole = train(tmp_path / "whole")
    for stop in (3, 9):
        with pytest.raises(Preempted):
            train(tmp_path / "parts", stop=stop)
    assert train(tmp_path / "parts") == whole
    assert train(tmp_path / "rows", Rows()) == whole


@pytest.mark.parametrize(
    "changes,data,text",
    [
        ({"bucket_by": None}, DATA, "data.bucket_by: is null, and bucket_boundaries and bucket_by go together"),
        ({"bucket_boundaries": [6, 6]}, DATA, "a list of lengths in ascending order"),
        ({"bucket_by": "lengths"}, DATA, "'lengths' of train_data is no leaf"),
        ({"bucket_by": "tokens"}, DATA, "'tokens' of train_data is int32[12]"),
        ({"bucket_boundaries": [3, 6]}, DATA, "no leaf of an example of train_data has 6 as its first dim"),
        (
            {},
            DATA | {"length": LENGTHS.astype(np.int32) + 1},
            "examples of train_data are longer than the last boundary",
        ),
        ({"bucket_boundaries": [1, 12]}, DATA, "train_data up to length 1 has"),
        ({"max_bad_examples": 3}, DATA, "data.max_bad_examples: has no effect with bucket_boundaries"),
    ],
)
def test_buckets_that_do_not_fit_are_refused(changes, data, text):
    with pytest.raises(ConfigError) as error:
        program_of(dataclasses.replace(TASK, train_data=data), data=BUCKETS | changes, batch_size=16)
    assert text in str(error.value)


def test_buckets_have_one_batch_size():
    with pytest.raises(ConfigError, match=r"data.bucket_boundaries needs one batch_size"):
        program_of(TASK, data=BUCKETS, batch_size={0: 8, 5: 4})
