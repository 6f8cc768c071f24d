"""What counts as data, how it is read, and the message of every refusal."""

from __future__ import annotations

import collections
import dataclasses

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdkit.data import open_source
from spmdkit.errors import ConfigError, UserCodeError

INDICES = np.array([3, 0, 2, 2], np.int64)


def images(num=5):
    return np.arange(num * 4, dtype=np.float32).reshape(num, 2, 2)


Pair = collections.namedtuple("Pair", ["x", "y"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    x: np.ndarray
    y: np.ndarray


@pytest.mark.parametrize(
    "data",
    [
        images(),
        jnp.asarray(images()),
        {"x": images(), "y": np.arange(5, dtype=np.int32)},
        (images(), np.arange(5, dtype=np.uint8)),
        Pair(images(), np.zeros(5, bool)),
        Registered(images(), jnp.ones(5, jnp.bfloat16)),
        {"a": {"b": images()}, "c": [images(), None]},
    ],
    ids=["array", "jax array", "dict", "tuple", "namedtuple", "dataclass", "nested"],
)
def test_pytree_of_arrays_gathers_rows_of_leaves(data):
    source = open_source(data)
    assert len(source) == 5 and source.in_memory and open_source(source) is source
    batch = source.gather(INDICES)
    assert jax.tree.structure(batch) == jax.tree.structure(data) == jax.tree.structure(source.element())
    for rows, leaf, spec in zip(*map(jax.tree.leaves, (batch, data, source.element())), strict=True):
        assert type(rows) is np.ndarray
        np.testing.assert_array_equal(rows, np.asarray(leaf)[INDICES])
        assert (spec.shape, spec.dtype) == (leaf.shape[1:], leaf.dtype) == (rows.shape[1:], rows.dtype)


@pytest.mark.parametrize("make", [np.asfortranarray, lambda x: np.repeat(x, 2, axis=0)[::2], lambda x: x[::-1][::-1]])
def test_non_contiguous_arrays_gather_the_same_rows(make):
    np.testing.assert_array_equal(open_source(make(images())).gather(INDICES), images()[INDICES])


def test_gathered_batch_does_not_share_memory():
    data = images()
    for indices in (INDICES, np.arange(5)):
        assert not np.shares_memory(open_source(data).gather(indices), data)


def test_an_npz_file_is_a_mapping_of_arrays(tmp_path):
    np.savez(tmp_path / "data.npz", x=images(), y=np.arange(5))
    with np.load(tmp_path / "data.npz") as file:
        source = open_source(file)
    assert sorted(source.gather(INDICES)) == ["x", "y"]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, ">i4"])
def test_memory_mapped_array_is_read_by_batch(tmp_path, dtype):
    path = tmp_path / "x.npy"
    np.save(path, images().astype(dtype))
    mapped = np.load(path, mmap_mode="r")
    source = open_source({"x": mapped, "tail": mapped[:, 0]})
    assert not source.in_memory
    batch = source.gather(INDICES)
    assert type(batch["x"]) is np.ndarray and batch["x"].dtype == source.element()["x"].dtype
    assert batch["x"].dtype in (np.float32, np.int32) and batch["x"].dtype.isnative
    np.testing.assert_array_equal(batch["x"], images()[INDICES])
    np.testing.assert_array_equal(batch["tail"], images()[INDICES][:, 0])
    assert all(np.shares_memory(leaf, mapped) for leaf in source._leaves), "the whole file was copied"


def test_int64_becomes_int32_after_a_range_check():
    edges = np.array([-(2**31), 2**31 - 1, 0], np.int64)
    batch = open_source({"y": edges, "z": np.array([0, 1, 2**32 - 1], np.uint64)}).gather(np.arange(3))
    assert batch["y"].dtype == np.int32 and batch["z"].dtype == np.uint32
    np.testing.assert_array_equal(batch["y"], edges)
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(ConfigError, match=rf"leaf 'y' is int64 with values from .*{value}.*int32.*JAX_ENABLE_X64"):
            open_source({"y": np.array([0, value, 0])} if value > 0 else {"y": np.array([value, 0])})


def test_mapped_int64_array_is_range_checked(tmp_path):
    np.save(tmp_path / "y.npy", np.array([0, 1, 2**40]))
    source = open_source({"y": np.load(tmp_path / "y.npy", mmap_mode="r")})
    assert source.gather(np.array([0, 1]))["y"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="leaf 'y' is int64 with values from 0 to 1099511627776"):
        source.gather(np.array([0, 2]))


def test_with_x64_the_64_bit_types_stay():
    with jax.enable_x64(True):
        batch = open_source((np.arange(5), np.linspace(0, 1, 5))).gather(INDICES)
    assert [leaf.dtype for leaf in batch] == [np.int64, np.float64]


class Examples:
    """A random-access object: `data[i]` from a function, as a user would write it."""

    def __init__(self, num, function):
        self.num, self.function, self.calls = num, function, []

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        self.calls.append(index)
        return self.function(index)


def example(index):
    return {"x": images()[index], "label": index, "weight": 0.5 * index, "flag": index > 1}


@pytest.mark.parametrize(
    "data",
    [
        Examples(5, example),
        [example(index) for index in range(5)],
        grain.MapDataset.source([example(index) for index in range(5)]),
        grain.MapDataset.range(5).map(example),
    ],
    ids=["object", "list", "grain source", "grain map"],
)
def test_examples_one_by_one_are_stacked(data):
    source = open_source(data)
    assert len(source) == 5 and not source.in_memory
    batch = source.gather(INDICES)
    np.testing.assert_array_equal(batch["x"], images()[INDICES])
    assert (batch["x"].dtype, batch["x"].shape) == (np.float32, (4, 2, 2))
    assert (batch["label"].tolist(), batch["label"].dtype) == ([3, 0, 2, 2], np.int32)
    assert (batch["weight"].tolist(), batch["weight"].dtype) == ([1.5, 0.0, 1.0, 1.0], np.float32)
    assert (batch["flag"].tolist(), batch["flag"].dtype) == ([True, False, True, True], np.bool_)
    for rows, spec in zip(jax.tree.leaves(batch), jax.tree.leaves(source.element()), strict=True):
        assert (rows.shape[1:], rows.dtype) == (spec.shape, spec.dtype)


def test_opening_reads_one_example_repeats_are_cached():
    data = Examples(100, lambda index: np.float32(index))
    source = open_source(data)
    assert data.calls == [0]
    assert source.gather(np.array([7, 7, 7, 8])).tolist() == [7, 7, 7, 8]
    assert data.calls == [0, 7, 8]


def test_grain_draws_differ_by_epoch_and_repeat():
    dataset = grain.MapDataset.range(5).seed(3).random_map(lambda i, rng: np.float32(i + rng.random()))
    first, again = open_source(dataset), open_source(dataset)
    assert first.gather(INDICES, epoch=1).tolist() == again.gather(INDICES, epoch=1).tolist()
    assert first.gather(INDICES, epoch=1).tolist() != first.gather(INDICES, epoch=0).tolist()
    np.testing.assert_array_equal(np.floor(first.gather(INDICES, epoch=9)), INDICES)


class NoLength:
    def __len__(self):
        raise OSError("disk gone")

    def __getitem__(self, index):
        return 0


class Table:
    __array__ = None


@dataclasses.dataclass
class Unregistered:
    x: np.ndarray


F64 = np.zeros((3, 2))


@pytest.mark.parametrize(
    "data,words",
    [
        ({"x": images(5), "y": images(4)}, ["5 examples in leaf 'x' float32[5,2,2]", "4 in leaf 'y'", "[:4]"]),
        ({"x": images(0)}, ["train_data is empty", "float32[0,2,2]", "at least 1"]),
        ([], ["train_data is empty", "len() is 0"]),
        ({}, ["train_data is {}", "holds no array"]),
        ({"x": F64}, ["leaf 'x' has dtype float64", "float32", ".astype(np.float32)"]),
        ({"name": np.array(["a", "b"])}, ["leaf 'name' has dtype <U1", "no device can hold", "np.unique"]),
        ({"o": np.array([{}, 1], object)}, ["leaf 'o' has dtype object", "no device can hold"]),
        (np.zeros(3, "datetime64[s]"), ["datetime64[s]", "no device can hold"]),
        (jax.random.split(jax.random.key(0), 3), ["key<fry>", "no device can hold"]),
        ({"x": images(), "n": np.float32(5)}, ["leaf 'n' is a float32, not an array"]),
        ({"x": images(), "n": np.zeros(())}, ["leaf 'n' is the scalar float64[]", "np.full"]),
        ({"x": np.ma.masked_array([1, 2], [True, False])}, ["masked array", ".filled(value)"]),
        ({1: images(), "a": images()}, ["not a pytree", "keys of one type"]),
        ("train.csv", ["train_data is a str.", "__len__ and __getitem__"]),
        ((i for i in range(3)), ["generator", "list(data)", "@sk.stream"]),
        (Unregistered(images()), ["Unregistered", "register_dataclass"]),
        (Table(), ["Table", "neither a numpy nor a JAX array", "to_numpy()"]),
        (grain.MapDataset.range(3).to_iter_dataset(), ["IterDataset", "stream"]),
        (grain.MapDataset.range(3).repeat(), ["endless", "Remove .repeat()"]),
        (grain.MapDataset.range(30).repeat(2**50), ["endless", "2**53"]),
        (grain.MapDataset.range(30).batch(8), ["of batches", ".batch(8)", "batch_size"]),
        (grain.MapDataset.range(30).repeat().batch(8), [".batch(8)", "Remove", ".repeat()"]),
        (grain.MapDataset.range(30).batch(8).map(lambda rows: rows / 2).shuffle(seed=0), [".batch(8)"]),
        (grain.MapDataset.mix([grain.MapDataset.range(30).batch(8)] * 2), [".batch(8)"]),
        (grain.MapDataset.range(3).filter(lambda i: i > 0), ["train_data[0] is None", "filter", "indices"]),
        ([{"tokens": [1, 2]}], ["train_data[0] holds a Python list of 2 numbers", "np.asarray(values, np.int32)"]),
        ([2**40], ["train_data[0] is int64", "2147483647"]),
        ([2**70], ["does not fit 64 bits"]),
    ],
)
def test_unusable_data_is_refused_when_it_is_opened(data, words):
    with pytest.raises(ConfigError) as error:
        open_source(data)
    for word in words:
        assert word in str(error.value)


X = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    "bad,words",
    [
        ({"x": np.zeros(3, np.float32), "y": 1}, ["data[2] leaf 'x' is float32[3]", "float32[2]", "Pad or crop"]),
        ({"x": X[:1], "y": 1}, ["data[2] leaf 'x' is float32[1]", "float32[2]"]),
        ({"x": np.zeros(2, np.int32), "y": 1}, ["data[2] leaf 'x' is int32[2]", "float32[2]"]),
        ({"x": X, "y": 1.0}, ["data[2] leaf 'y' is float32[]", "int32[]"]),
        ({"x": X, "z": 1}, ["data[2] has the structure", "example 0 has"]),
        (None, ["data[2] is None"]),
    ],
)
def test_differing_example_is_named_when_read(bad, words):
    source = open_source([{"x": X, "y": 1}, {"x": X, "y": np.int64(1)}, bad], "data")
    assert source.gather(np.array([0, 1]))["y"].tolist() == [1, 1]
    with pytest.raises(ConfigError) as error:
        source.gather(np.array([0, 1, 2]))
    for word in words:
        assert word in str(error.value)


def test_data_error_is_a_user_error_with_index():
    def read(index):
        return np.float32([1.0, 2.0][index])

    source = open_source(Examples(5, read))
    with pytest.raises(UserCodeError, match=r"train_data\[4\] raised IndexError.*0 to 4.*len\(\) is 5") as error:
        source.gather(np.array([0, 4]))
    assert type(error.value.__cause__) is IndexError
    with pytest.raises(UserCodeError, match=r"train_data\[0\] raised ZeroDivisionError") as error:
        open_source(Examples(5, lambda index: 1 / index))
    assert type(error.value.__cause__) is ZeroDivisionError
    with pytest.raises(UserCodeError, match=r"len\(train_data\) raised OSError: disk gone"):
        open_source(NoLength())
