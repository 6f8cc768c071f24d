"""Common tasks about data: each with at most one line more than the shortest form in Accelerate, Lightning, Keras,
Levanter, DeepSpeed or nanoGPT."""

import textwrap

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.common_tasks import BATCH, ROWS, STEPS, loss_of, plain

IN_ORDER = "data.shuffle=false"


def of_all_steps(data=ROWS):
    """Returns the rows of all steps, in order."""
    num = STEPS * BATCH
    return {name: np.tile(x, (-(-num // len(x)), *[1] * (x.ndim - 1)))[:num] for name, x in data.items()}


def stacked(rows):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def same(found, expected):
    np.testing.assert_allclose(found, expected.losses, rtol=1e-5)
    assert found[-1] < found[0]


def write_parquet(folder, files=1):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for i, ids in enumerate(np.split(np.arange(32), files)):
        columns = {name: pa.FixedSizeListArray.from_arrays(x[ids].ravel(), x.shape[1]) for name, x in ROWS.items()}
        pq.write_table(pa.table(columns), folder / f"{i}.parquet", row_group_size=8)


@pytest.mark.streams
def test_1_hugging_face_map_style(user):
    pytest.importorskip("datasets")
    write_parquet(user.path)
    code = """
        import datasets
        data = datasets.load_dataset("parquet", data_files="0.parquet", split="train", cache_dir="cache")
    """
    user.with_lines(1 + 1, code)
    same(user.train(IN_ORDER), plain(of_all_steps()))


@pytest.mark.streams
def test_2_hugging_face_stream(user, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    write_parquet(user.path)
    code = """
        import datasets
        data = datasets.load_dataset("parquet", data_files="0.parquet", split="train", streaming=True)
    """
    user.with_lines(0 + 1, code)
    same(user.train(), plain(of_all_steps()))
    user.continues_bitwise()


@pytest.mark.streams
def test_3_torch_data_loader(user):
    pytest.importorskip("torch")
    code = """
        from torch.utils.data import DataLoader
        data = DataLoader(Examples(), batch_size=16)
    """
    user.with_lines(1 + 1, code)
    same(user.train(), plain(of_all_steps()))
    user.continues_bitwise()


@pytest.mark.streams
def test_3_torch_data_loader_with_workers(user):
    pytest.importorskip("torch")
    code = """
        from torch.utils.data import DataLoader, Subset
        data = sk.stream(lambda i, num, seed: DataLoader(Subset(Examples(), range(i, 32, num)), batch_size=2))
    """
    user.with_lines(1 + 1, code, config="data: {workers: 2}\n")
    same(user.train(), plain(of_all_steps()))


def test_4_generator(user):
    given = """
        def rows(first, step):
            yield from (Examples()[i] for i in range(first, 32, step))
    """
    user.with_lines(1 + 1, "data = sk.stream(lambda shard, num_shards, seed: rows(shard, num_shards))", given=given)
    same(user.train(), plain(of_all_steps()))
    user.continues_bitwise()


def test_5_grain_iterator(user):
    code = """
        import grain
        rows = grain.MapDataset.source(Examples()).shuffle(seed=1).repeat().to_iter_dataset()
        data = rows.filter(lambda row: row["x"][0] > -0.5).batch(8)
    """
    user.with_lines(6 + 1, code, config="data: {shards: 1}\n")
    ids = iter(grain.MapDataset.source(range(32)).shuffle(seed=1).repeat())
    kept = [i for i, _ in zip((i for i in ids if ROWS["x"][i, 0] > -0.5), range(STEPS * BATCH), strict=False)]
    same(user.train(), plain({name: x[kept] for name, x in ROWS.items()}))


BIGRAM = """
def init(key):
    return {"table": jnp.zeros((8, 8))}

def losses_of(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(params["table"][batch["inputs"]], batch["targets"])

def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))
"""


def plain_bigram(data, **more):
    def loss(params, batch):
        logits = params["table"][batch["inputs"]]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        weights = batch.get("weights", jnp.ones_like(losses))
        return (losses * weights).sum() / weights.sum()

    return plain(data, loss, params={"table": jnp.zeros((8, 8))}, **more)


def test_5_grain_packing(user):
    given = """
        documents = [{"inputs": np.arange(1 + i % 5, dtype=np.int32)} for i in range(32)]
        documents = [row | {"targets": row["inputs"] + 1} for row in documents]
    """
    code = """
        import grain
        rows = grain.MapDataset.source(documents).repeat().to_iter_dataset()
        data = grain.experimental.FirstFitPackIterDataset(
            rows, length_struct={"inputs": 8, "targets": 8}, num_packing_bins=4
        )
        def loss_fn(params, batch, key):
            return sk.mean(losses_of(params, batch), where=batch["targets_segment_ids"] > 0)
    """
    user.with_lines(6 + 1, code, config="data: {shards: 1}\n", given=BIGRAM + textwrap.dedent(given))
    losses = user.train()
    names = {"np": np}
    exec(textwrap.dedent(given + code.partition("def")[0]), names)
    rows = [row for row, _ in zip(names["data"], range(STEPS * BATCH), strict=False)]
    packed = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    same(losses, plain_bigram(packed | {"weights": (packed["targets_segment_ids"] > 0).astype(np.float32)}))
    user.continues_bitwise()


def test_6_memory_mapped_tokens(user):
    tokens = np.tile(np.arange(8, dtype=np.uint16), 17)[: 32 * 4 + 1]
    tokens.tofile(user.path / "train.bin")
    user.with_lines(6 + 1, 'data = sk.tokens("train.bin", context=4, dtype="uint16")', given=BIGRAM)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int32), 5)[::4]
    same(user.train(IN_ORDER), plain_bigram(of_all_steps({"inputs": windows[:, :-1], "targets": windows[:, 1:]})))


@pytest.mark.streams
def test_7_parquet(user):
    write_parquet(user.path, files=2)
    user.with_lines(2 + 1, 'data = sk.parquet("*.parquet")')
    losses = user.train()
    assert losses[-1] < losses[0]
    user.continues_bitwise()


def test_8_padding_masks_and_a_short_batch(user):
    inputs, lengths = np.random.default_rng(0).integers(0, 8, (24, 5), np.int32), np.arange(24) % 6
    data = {"inputs": inputs, "targets": (inputs + 1) % 8, "mask": np.arange(5) < lengths[:, None]}
    np.savez(user.path / "rows.npz", **data)
    given = """
        with np.load("rows.npz") as file:
            data = dict(file)
    """
    code = """
        def loss_fn(params, batch, key):
            return sk.mean(losses_of(params, batch), where=batch["mask"])
    """
    user.with_lines(6 + 1, code, config="data: {drop_remainder: false}\n", given=BIGRAM + textwrap.dedent(given))
    padded = {name: np.concatenate([x, np.zeros_like(x[:8])] * 2) for name, x in data.items()}
    expected = plain_bigram({**padded, "weights": padded.pop("mask").astype(np.float32)})
    same(user.train(IN_ORDER), expected)
    same(user.train(IN_ORDER, "mesh={data: 2, fsdp: 2}", run="other"), expected)


def test_9_epochs(user):
    user.with_lines(1 + 1, config="epochs: 2\n", base={"steps": None})
    same(user.train(IN_ORDER), plain(of_all_steps()))
    assert [record["epoch"] for record in user.records()] == [0.5, 1, 1.5, 2]


def test_10_several_evaluation_sets(user):
    sets = '{"clean": data, "hard": {name: 2 * x for name, x in data.items()}}'
    user.with_lines(1 + 1, task={"eval_data": sets})
    user.train(IN_ORDER)
    found = user.records()[-1]
    params = user.params()
    error = lambda scale: np.mean((scale * (ROWS["x"] @ params["w"] - ROWS["y"]) + params["b"]) ** 2)
    np.testing.assert_allclose([found["clean/loss"], found["hard/loss"]], [error(1), error(2)], rtol=1e-5)


def test_11_image_augmentation(user):
    code = """
        import grain
        flip = lambda row, rng: {**row, "x": row["x"][:: rng.choice([1, -1])]}
        data = grain.MapDataset.source(Examples()).seed(0).random_map(flip)
    """
    user.with_lines(1 + 1, code)
    flip = lambda i, rng: ROWS["x"][i][:: rng.choice([1, -1])]
    flipped = iter(grain.MapDataset.source(range(32)).seed(0).random_map(flip).repeat())
    x = np.stack([row for row, _ in zip(flipped, range(STEPS * BATCH), strict=False)])
    assert 0.2 < (x != of_all_steps()["x"]).mean() < 0.8 and (x[:32] != x[32:]).any()
    same(user.train(IN_ORDER), plain(of_all_steps() | {"x": x}))
    user.continues_bitwise(IN_ORDER)


LABELS = (np.arange(32) % 8 == 0).astype(np.int32)
CLASSES = """
data["label"] = (np.arange(32) % 8 == 0).astype(np.int32)

def losses_of(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2, -1)
"""


def test_12_class_weights(user):
    code = """
        def loss_fn(params, batch, key):
            return sk.mean(losses_of(params, batch), weights=jnp.array([1.0, 7.0])[batch["label"]])
    """
    user.with_lines(1 + 1, code, given=CLASSES)

    def loss(params, batch):
        losses = ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean(-1)
        weights = jnp.where(batch["label"], 7.0, 1.0)
        return (losses * weights).sum() / weights.sum()

    same(user.train(IN_ORDER), plain(of_all_steps(ROWS | {"label": LABELS}), loss))


def test_12_weighted_sampler(user):
    code = """
        import grain
        share = np.where(data["label"], 1 / 8, 1 / 56)
        data = grain.MapDataset.range(10**6).seed(0).random_map(lambda _, rng: Examples()[rng.choice(32, p=share)])
    """
    user.with_lines(1 + 1, code, given=CLASSES)
    share = np.where(LABELS, 1 / 8, 1 / 56)
    drawn = grain.MapDataset.range(10**6).seed(0).random_map(lambda _, rng: rng.choice(32, p=share))
    ids = np.array([drawn[i] for i in range(STEPS * BATCH)])
    assert 0.3 < LABELS[ids].mean() < 0.7
    same(user.train(IN_ORDER), plain({name: x[ids] for name, x in ROWS.items()}))


def test_13_endless_synthetic_data(user):
    given = """
        def example(rng):
            x = rng.normal(size=4).astype(np.float32)
            return {"x": x, "y": x.sum() * np.ones(8, np.float32)}
    """
    code = """
        import grain
        data = grain.MapDataset.range(10**12).seed(0).random_map(lambda _, rng: example(rng))
    """
    user.with_lines(3 + 1, code, given=given)
    drawn = grain.MapDataset.range(10**12).seed(0).random_map(lambda _, rng: rng.normal(size=4).astype(np.float32))
    x = np.stack([drawn[i] for i in range(STEPS * BATCH)])
    same(user.train(IN_ORDER), plain({"x": x, "y": np.stack([x.sum(1)] * 8, 1)}))
    user.train(run="shuffled")


def test_14_batch_size_warm_up(user):
    user.with_lines(1 + 1, config="batch_size: {0: 8, 2: 16}\n")
    params, losses = {"w": jnp.zeros((4, 8)), "b": jnp.zeros(8)}, []
    for first, last in ((0, 8), (8, 16), (16, 32), (0, 16)):
        loss, grads = jax.value_and_grad(loss_of)(params, {name: x[first:last] for name, x in ROWS.items()})
        params = jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads)
        losses.append(loss)
    np.testing.assert_allclose(user.train(IN_ORDER), losses, rtol=1e-5)
    user.continues_bitwise(IN_ORDER)
