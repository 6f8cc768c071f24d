"""The largest values alone: which they are, what is refused, and with which words."""

import numpy as np
import pytest

import spmdkit as sk
from spmdkit.communication.reducers import topk
from spmdkit.communication.reducers.base import ReducedLeaf
from tests.support.messages import raises
from tests.support.reducer_runs import alone, program


def test_each_replica_sends_its_largest_values():
    random = np.random.default_rng(0)
    terms, residuals = (random.normal(size=(4, 5000)).astype(np.float32) for _ in range(2))
    k, requested = 1024, terms + residuals
    sent = np.zeros_like(requested)
    for row, out in zip(requested, sent, strict=True):
        largest = np.argsort(-np.abs(row))[:k]
        out[largest] = row[largest]

    (total,), (left,) = alone(topk.make(fraction=0.25, most=None))([terms], [{"error": residuals}])
    np.testing.assert_array_equal(total, ((sent[0] + sent[1]) + sent[2]) + sent[3])
    np.testing.assert_array_equal(left["error"], requested - sent)


def test_no_saving_or_nothing_to_send_is_rejected():
    with raises(
        ("topk", "fraction: 0.01", "8 replicas"), "17,416", "fewer than 1,024", "fraction: 0.056, or reducer: int8"
    ):
        program("data 8", "topk")
    with raises(
        "fraction: 0.12",
        ("2,048 values from each replica", "0.94 of the bytes of sum"),
        "the limit is 0.5",
        "fraction: 0.056, or",
    ):
        program("data 8", {"topk": {"fraction": 0.12}})
    with raises("fraction: 0.01", "16,384 values from each", "0.63", "Try fraction: 0.007, or reducer: int8"):
        topk.make().check([ReducedLeaf("w", (1_668_000,), {"replica": 2, "data": 32}, ())])
    topk.make(fraction=0.007).check([ReducedLeaf("w", (1_668_000,), {"replica": 2, "data": 32}, ())])


def test_too_short_vector_is_reduced_as_sum():
    leaves = [ReducedLeaf("w", (1 << 20,), {"data": 4}, ("tensor",)), ReducedLeaf("b", (8,), {"data": 4}, ())]
    topk.make().check(leaves)
    with raises("8 values"):
        topk.make().check(leaves[1:])


def test_residual_is_applied_when_everything_is_sent():
    made, ones = topk.make(fraction=0.01), np.ones((4, 8), np.float32)
    (total,), (left,) = alone(made)([ones], [{"error": 2 * ones}])
    assert (total == 12).all() and not left["error"].any()


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"fraction": 0}, ("topk.fraction is 0", "fraction of the values", "Write fraction: 0.01")),
        ({"fraction": 1.5}, ("topk.fraction is 1.5",)),
        ({"fraction": True}, ("topk.fraction is True",)),
        ({"most": 0}, ("topk.most is 0", "or null", "Write most: 0.5")),
    ],
)
def test_options_that_are_none_are_refused(options, parts):
    with raises(parts):
        sk.Config(task="t.py:t", reducer={"topk": options})
