"""Each library's data: the same batches on any number of processes, and after a restart."""

import random

import numpy as np
import pytest

from spmdkit.data.source import open_source
from spmdkit.data.stream_reader import check_stream
from spmdkit.data.streams.base import open_stream
from spmdkit.data.streams.function import stream
from spmdkit.errors import CheckpointError, ConfigError, UserCodeError
from tests.support.libraries import LIBRARIES, NUM, grain_map, hugging_face, loader, numbered
from tests.support.streams import SIZE, Job, batches

STEPS = 12
pytestmark = [
    pytest.mark.streams,
    # torchdata 0.11 on torch 2.13; a dataset of Hugging Face that is only counted
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def made(kind, folder):
    """Returns (data, whether exact, number of shards) of a kind, or skips the test."""
    package, make, exact, sharded = LIBRARIES[kind]
    pytest.importorskip(package)
    return make(folder), exact, 8 if sharded else None


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_library_is_read_on_any_processes_and_continues(kind, tmp_path):
    data, exact, shards = made(kind, tmp_path)
    assert check_stream(open_stream(data), "train_data", 11, shards, False).exact == exact
    one = batches(data, STEPS, shards=shards)
    assert len(np.unique(one)) > NUM * 0.6 and one.max() < NUM
    stops = [0, *sorted(random.Random(1).sample(range(1, STEPS), 3)), STEPS]
    found, at = [], None
    for processes, start, stop in zip((4, 2, 1, 4), stops, stops[1:], strict=False):
        workers = 0 if processes > 1 else 2 if kind == "grain" else 1
        job = Job(data, processes=processes, start=start, at=at, shards=shards, workers=workers)
        found += [job.step()[1] for _ in range(start, stop)]
        job.step()  # read ahead: in no position
        at = job.position(stop)
        job.close()
    np.testing.assert_array_equal(np.stack(found), one)


@pytest.mark.parametrize("kind", [kind for kind in LIBRARIES if "mix" not in kind and "interleaved" not in kind])
def test_an_epoch_has_each_example_once(kind, tmp_path):
    data, _, shards = made(kind, tmp_path)
    job = Job(data, shards=shards, repeat=False)
    steps = [job.step() for _ in range(NUM // SIZE)]
    ids = np.concatenate([rows[mask] for _, rows, mask in steps])
    job.close()
    assert len(ids) == len(set(ids)) == (NUM * 4 // 5 if "filter" in kind else NUM)


def test_a_torch_loop_and_later_epochs():
    torch = pytest.importorskip("torchdata") and pytest.importorskip("torch")
    for kind in ("torch", "torchdata"):
        data = loader(kind, batch_size=32, shuffle=True)
        stream = open_stream(data)
        first = np.stack([next(shard)["id"] for shard in [stream.open(0, 1, 3, 0, None)] for _ in range(10)])
        later = np.stack([next(shard)["id"] for shard in [stream.open(0, 1, 3, 1, None)] for _ in range(10)])
        np.testing.assert_array_equal(first, np.stack([batch["id"] for batch in data]))
        assert (first != later).any() and set(first.ravel()) == set(later.ravel())
    with pytest.raises(ConfigError, match=r"shuffles without a generator.*manual_seed"):
        open_stream(torch.utils.data.DataLoader([1, 2], shuffle=True))
    shard = stream.open(0, 1, 3, 0, None)
    next(shard)
    with pytest.raises(CheckpointError, match=r"that of 3 worker processes, .* num_workers=0"):
        stream.open(0, 1, 3, 0, {**shard.state(), "num_workers": 3})


def test_interleaved_data_are_sharded_before(tmp_path):
    data, _, _ = made("hf, interleaved", tmp_path)
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"at most 1: with interleave_datasets before shard.* seed=seed \+ shard\)"):
        Job(data, shards=8)

    def rows(differs):
        def parts(shard, num_shards, seed):
            of_files = [hugging_face(tmp_path).shard(num_shards, shard) for _ in range(2)]
            return datasets.interleave_datasets(of_files, probabilities=[0.7, 0.3], seed=seed + differs * shard)

        return stream(parts)

    with pytest.raises(ConfigError, match=r"shards 0 and 1 of the stream draw the same sources.*Shard each source"):
        Job(rows(differs=False), shards=2).step()
    job = Job(rows(differs=True), shards=2)
    steps = [job.step() for _ in range(9)]  # also the end of an epoch
    job.close()
    assert len(steps) == 9


def test_hugging_face_rows_have_the_dtypes_of_their_format():
    datasets = pytest.importorskip("datasets")
    dtypes = ("uint8", "int16", "float16", "bool")
    data = datasets.Dataset.from_dict(
        {f"{name}{ndim}": np.ones((6, 2)[: ndim + 1], name) for name in dtypes for ndim in (0, 1)}
    ).to_iterable_dataset()
    row = next(iter(data.with_format("numpy")))
    expected = {name: np.dtype(str(x.dtype).replace("int64", "int32")) for name, x in row.items()}
    for form in (None, "numpy"):
        checked = check_stream(open_stream(data.with_format(form)), "train_data", 0, 1, False)
        found = {name: x.dtype for name, x in checked.element().items()}
        assert checked.batched and found == (expected if form else {name: np.dtype(name[:-1]) for name in row})


def test_an_order_without_a_seed_is_rejected(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = hugging_face(tmp_path)
    mixed = datasets.interleave_datasets([data, data], probabilities=[0.5, 0.5])
    for unseeded in (data.shuffle(buffer_size=20), data.shuffle(buffer_size=20).map(dict), mixed):
        with pytest.raises(ConfigError, match=r"without a seed, .*shuffle\(seed=0"):
            open_stream(unseeded)


def test_a_map_style_dataset_is_one_call_per_batch(monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"id": list(range(NUM)), "x": [[float(i)] * 3 for i in range(NUM)]})
    calls, plain = [], type(data).__getitems__
    monkeypatch.setattr(type(data), "__getitems__", lambda self, keys: calls.append(keys) or plain(self, keys))
    rows = open_source(data).gather(np.array([7, 3, 3, 319]))
    np.testing.assert_array_equal(rows["id"], np.array([7, 3, 3, 319], np.int32))
    np.testing.assert_array_equal(rows["x"][:, 0], np.array([7, 3, 3, 319], np.float32))
    assert calls == [[7, 3, 3, 319]]
    with pytest.raises(ConfigError, match=r"several data sets\. Pass one of them: data\['train'\]"):
        open_source(datasets.DatasetDict({"train": data}))


def array_records(folder):
    """Returns a grain dataset of two ArrayRecord files."""
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    for part, ids in enumerate(np.split(np.arange(NUM), 2)):
        writer = ArrayRecordWriter(f"{folder}/{part}.array_record", "group_size:1")
        for i in ids:
            writer.write(np.float32([i, *numbered(i)["x"]]).tobytes())
        writer.close()
    files = grain.sources.ArrayRecordDataSource(sorted(map(str, folder.glob("*.array_record"))))
    rows = grain.MapDataset.source(files).map(lambda record: np.frombuffer(record, np.float32))
    return rows.map(lambda row: {"id": row[0].astype(np.int32), "x": row[1:]})


def test_array_records_are_indexed(tmp_path):
    data = array_records(tmp_path)
    source = open_source(data)
    assert open_stream(data) is None and len(source) == NUM
    indices = np.random.default_rng(0).permutation(NUM)[:9]
    rows = source.gather(indices)
    np.testing.assert_array_equal(rows["id"], indices)
    np.testing.assert_array_equal(rows["x"], np.stack([numbered(i)["x"] for i in indices]))


def test_grain_maps_are_indexed():
    import grain

    first, other = grain_map(), grain_map().map(lambda row: {**row, "id": row["id"] + np.int32(NUM)})
    for data in (grain.MapDataset.mix([first, other], weights=[0.5, 0.5]), first.seed(3).random_map(noise)):
        source = open_source(data)
        assert open_stream(data) is None
        indices = np.random.default_rng(0).permutation(len(source))[:9]
        rows = source.gather(indices, epoch=1)
        np.testing.assert_array_equal(rows["id"], [data[len(source) + int(i)]["id"] for i in indices])
        np.testing.assert_array_equal(rows["x"], source.gather(indices, epoch=1)["x"])


def noise(row, rng):
    return {**row, "x": row["x"] + rng.normal(size=3).astype(np.float32)}


@pytest.mark.parametrize("make", [lambda rows: rows.shuffle(seed=1), lambda rows: rows.repeat(3)])
def test_shards_of_grain_are_its_slices(make):
    import grain

    data, shards = make(grain.MapDataset.range(11)), 4
    for shard in range(shards):
        opened = open_stream(data.to_iter_dataset()).open(shard, shards, 0, 0, None)
        assert list(iter(opened.__next__, None)) == list(data.slice(slice(shard, None, shards)).to_iter_dataset())


def test_rows_of_getitems_that_raise_are_named():
    class Rows(list):
        def __getitems__(self, keys):
            return [self[key] for key in keys]

        def __getitem__(self, i):
            return np.float32(i) if i != 3 else 1 / 0

    source = open_source(Rows(range(5)))
    np.testing.assert_array_equal(source.gather(np.array([4, 0])), np.float32([4, 0]))
    with pytest.raises(UserCodeError, match=r"train_data\[3\] raised ZeroDivisionError"):
        source.gather(np.array([4, 3]))
