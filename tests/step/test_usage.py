"""What a trace notices of the user's code: calls, axes, marks, and how many metrics left padding rows out."""

import pytest

from spmdkit.step.usage import UsageTracker


def test_it_knows_what_was_called_and_named():
    noticed = UsageTracker()
    noticed.called("mean")
    noticed.axis("tensor", "context")
    noticed.mark("attention")
    noticed.masked()
    assert noticed.has_called("mean") and noticed.has_called("pipeline", "mean") and not noticed.has_called("pipeline")
    assert noticed == UsageTracker({"mean"}, {"tensor", "context"}, {"attention"}, 1)
    with pytest.raises(AssertionError, match="stands in no table"):
        noticed.called("men")


def test_a_copy_notices_for_itself_until_it_is_included():
    noticed = UsageTracker({"mean", "remat"}, num_masked=2)
    own = noticed.without("remat")
    own.called("attention")
    own.axis("tensor")
    own.masked()
    assert noticed == UsageTracker({"mean", "remat"}, num_masked=2)
    noticed.include(own)
    assert noticed == UsageTracker({"mean", "remat", "attention"}, {"tensor"}, num_masked=3)
