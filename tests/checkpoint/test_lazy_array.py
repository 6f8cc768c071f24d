"""Rearranged arrays of a file read the same values as numpy, slice by slice, and no more than they need."""

import random

import numpy as np
import pytest

from spmdkit.checkpoint.lazy_array import LazyArray, concatenate, stack
from spmdkit.errors import ConfigError


def lazy(array, boxes=None):
    def fetch(box):
        assert all(0 <= x.start < x.stop <= size for x, size in zip(box, array.shape, strict=True)), box
        if boxes is not None:
            boxes.append(tuple(x.stop - x.start for x in box))
        return array[box]

    return LazyArray("x", array.shape, array.dtype, fetch)


X = np.arange(120).reshape(4, 6, 5)
FORMS = {
    "transpose": (lambda x: x.transpose(1, 2, 0), lambda x: x.transpose(1, 2, 0)),
    "T": (lambda x: x.T, lambda x: x.T),
    "part": (lambda x: x[1:, ..., 2:4], lambda x: x[1:, ..., 2:4]),
    "split": (lambda x: x.split(3, 1)[1], lambda x: np.split(x, 3, 1)[1]),
    "stack": (lambda x: stack([x, x.split(1)[0], x], -1), lambda x: np.stack([x, x, x], -1)),
    "concatenate": (lambda x: concatenate([x, x[:2], x]), lambda x: np.concatenate([x, x[:2], x])),
    "split and merge": (lambda x: x.reshape(2, 2, 30), lambda x: x.reshape(2, 2, 30)),
    "other sizes": (lambda x: x.reshape(8, -1), lambda x: x.reshape(8, -1)),
    "ones": (lambda x: x.reshape(1, 24, 5, 1), lambda x: x.reshape(1, 24, 5, 1)),
    "heads": (lambda x: x.reshape(4, 3, 2, 5).T, lambda x: x.reshape(4, 3, 2, 5).T),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_slice_is_that_of_numpy(form):
    ours, theirs = FORMS[form]
    array, expected, draw = ours(lazy(X)), theirs(X), random.Random(form)
    assert array.shape == expected.shape and np.array_equal(array.read(), expected)
    for _ in range(40):
        index = tuple(slice(*sorted(draw.sample(range(size + 1), 2))) for size in expected.shape)
        assert np.array_equal(array.read(index), expected[index]), index


def test_a_slice_reads_only_its_part():
    boxes = []
    stacked = stack([lazy(X, boxes).transpose(2, 0, 1) for _ in range(8)])
    stacked.read((slice(2, 4), slice(0, 1)))
    assert boxes == [(4, 6, 1)] * 2
    boxes.clear()
    lazy(X, boxes).reshape(4, 3, 10).split(3, 1)[2].read((slice(1, 2),))
    assert boxes == [(1, 2, 5)]


def test_arrays_without_elements_are_not_read():
    assert lazy(np.zeros((0, 3), np.int8)).reshape(3, 0).read().shape == (3, 0)
    assert lazy(np.float32(2.0).reshape(())).reshape(1, 1).read() == [[2.0]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x.split(4, 1), ["split of dim 1 into 4 parts", "must divide 6"]),
        (lambda x: x.reshape(7, -1), ["reshape to [7, -1]", "number of elements"]),
        (lambda x: x.transpose(0, 0, 1), ["transpose to dims (0, 0, 1)"]),
        (lambda x: x[::2], ["slices without a step"]),
        (lambda x: stack([x, x.T]), ["stack", "equal shapes"]),
        (lambda x: concatenate([]), ["no arrays"]),
        (lambda x: x.split(2, 3), ["no dim 3"]),
    ],
)
def test_a_wrong_operation_names_the_array(wrong, words):
    with pytest.raises(ConfigError) as error:
        wrong(lazy(X))
    assert all(word in str(error.value) for word in words), error.value
