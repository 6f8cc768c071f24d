"""What a trace notices of the user's code: calls, axes, marks, and how many metrics left padding rows out."""

import pytest

from spmdkit.step.usage import UsageTracker


def test_it_knows_what_was_called_and_named():
    noticed = UsageTracker()
    noticed.record_call("mean")
    noticed.record_axes("tensor", "context")
    noticed.record_name("attention")
    noticed.record_masked_metric()
    assert noticed.has_called("mean") and noticed.has_called("pipeline", "mean") and not noticed.has_called("pipeline")
    assert noticed == UsageTracker({"mean"}, {"tensor", "context"}, {"attention"}, 1)
    with pytest.raises(AssertionError, match="is not a recorded function"):
        noticed.record_call("men")


def test_copy_is_independent_until_merged():
    noticed = UsageTracker({"mean", "remat"}, num_masked=2)
    own = noticed.without("remat")
    own.record_call("attention")
    own.record_axes("tensor")
    own.record_masked_metric()
    assert noticed == UsageTracker({"mean", "remat"}, num_masked=2)
    noticed.merge_from(own)
    assert noticed == UsageTracker({"mean", "remat", "attention"}, {"tensor"}, num_masked=3)
