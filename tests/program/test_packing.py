"""Rows packed by grain: documents are independent in `sk.attention`, and a task that ignores the ids is rejected."""

import contextlib

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.cluster import ClusterSpec, join
from spmdkit.errors import ConfigError
from spmdkit.run.prediction import predict
from tests.support.core_runs import program_of
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except

MESHES = [{}, {"data": 2, "fsdp": 2}]
V, T, D, N, H = 19, 16, 8, 2, 4
random = np.random.default_rng(0)
DOCUMENTS = [random.integers(0, V, random.integers(2, 9)).astype(np.int32) for _ in range(60)]


def packed(documents):
    """Returns rows of `tokens`, `tokens_segment_ids` and `tokens_positions`, int32[T]."""
    rows = grain.MapDataset.source([{"tokens": x} for x in documents]).to_iter_dataset()
    return grain.experimental.FirstFitPackIterDataset(rows, length_struct={"tokens": T}, num_packing_bins=4)


def init(key):
    return {"embed": normal(0, V, D), "place": normal(1, T, D), "qkv": normal(2, D, 3 * N * H) / 2,
            "head": normal(3, N * H, V)}  # fmt: skip


def logits(params, batch, with_ids=True):
    ids = batch["tokens_segment_ids"] - 1  # 0 is padding of grain
    x_BTD = params["embed"][batch["tokens"]] + params["place"][batch["tokens_positions"]]
    q, k, v = ((x_BTD @ w).reshape(*ids.shape, N, H) for w in jnp.split(params["qkv"], 3, -1))
    out_BTNH = sk.attention(q, k, v, segment_ids_BT=ids if with_ids else None)
    return out_BTNH.reshape(*ids.shape, -1) @ params["head"]


def task_of(data, **options):
    def loss_fn(params, batch, key):
        ids = batch["tokens_segment_ids"]
        is_target = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        scores = logits(params, batch, **options)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["tokens"][:, 1:])
        loss = sk.mean(losses, where=is_target)
        return loss, {"perplexity": sk.derived(jnp.exp, sk.mean(losses, where=is_target))}

    return sk.Task(init, loss_fn, optax.adam(0.01), train_data=data, eval_data=data, predict_fn=logits)


@pytest.mark.parametrize("mesh", slow_except(MESHES[1:], MESHES))
def test_logits_of_a_document_equal_those_of_the_document_alone(tmp_path, mesh):
    config = sk.Config(
        task="t.py:t", run_dir=str(tmp_path), batch_size=4, steps=1, mesh=mesh, compile_cache=None,
        devices=f"cpu:{max(1, 2 * len(mesh))}", data={"shards": 1},
    )  # fmt: skip
    cluster = join(ClusterSpec(), config.devices)
    rows = [{name: np.asarray(x) for name, x in row.items()} for row in packed(DOCUMENTS)]
    rows = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    found = predict(config, rows, cluster=cluster, task=task_of(packed(DOCUMENTS)), initial=True)
    places = np.arange(T, dtype=np.int32)
    wanted = jax.jit(logits)(init(None), {
        "tokens": np.stack([np.pad(document, (0, T - len(document))) for document in DOCUMENTS]),
        "tokens_positions": np.broadcast_to(places, (len(DOCUMENTS), T)),
        "tokens_segment_ids": np.stack([(places < len(document)).astype(np.int32) for document in DOCUMENTS]),
    })  # fmt: skip
    of_document = {document.tobytes(): each[: len(document)] for document, each in zip(DOCUMENTS, wanted, strict=True)}
    count = 0
    for row, ids in enumerate(rows["tokens_segment_ids"]):
        for segment in range(1, ids.max() + 1):
            at = np.flatnonzero(ids == segment)
            alone = of_document[rows["tokens"][row, at].tobytes()]
            np.testing.assert_allclose(found[row, at], alone, rtol=1e-5, atol=1e-5)
            count += 1
    assert count == len(DOCUMENTS)


@pytest.mark.parametrize("mesh", slow_except(MESHES[1:], MESHES))
def test_a_task_that_ignores_the_ids_is_rejected(mesh):
    for with_ids in (False, True):
        task = task_of(packed(DOCUMENTS), with_ids=with_ids)
        program = program_of(task, batch_size=8, mesh=mesh, data={"shards": 1})
        (_, batch), *_ = program.batches(stop=1)
        rejected = pytest.raises(ConfigError, match=r"documents change each other.*tokens_segment_ids'\] - 1\)")
        with contextlib.nullcontext() if with_ids else rejected:
            program.step(program.init(), batch)


def test_a_loss_that_is_no_sum_over_rows_is_not_judged():
    def loss_fn(params, batch, key):
        used = sk.all_gather(jax.nn.softmax(logits(params, batch)).mean((1,)))
        return sk.scalar((used.mean(0) ** 2).sum()), {}

    task = sk.Task(init, loss_fn, optax.adam(0.01), train_data=packed(DOCUMENTS))
    program = program_of(task, batch_size=8, mesh={"data": 2}, data={"shards": 1})
    (_, batch), *_ = program.batches(stop=1)
    program.step(program.init(), batch)
