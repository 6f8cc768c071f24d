"""What Gloo says is left out of what the launcher shows, and nothing else with it."""

import os
import tracemalloc

import pytest

from spmdkit.launch import output
from spmdkit.launch.output import without_greeting
from spmdkit.launch.supervisor import ReportFile

WHOLE = "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
TWO_AT_ONCE = (
    "[Gloo] Rank [Gloo] Rank 10 is connected to  is connected to 11 peer ranks.  peer ranks. "
    "Expected number of connected peer ranks is : Expected number of connected peer ranks is : 11"
)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (WHOLE, None),
        (TWO_AT_ONCE, None),
        ("[Gloo] Rank step 1/3  loss 8.0000", "step 1/3  loss 8.0000"),
        ("", ""),
        ("12 is connected to 3 peer ranks. ", "12 is connected to 3 peer ranks. "),
        ("Gloo all-reduce failed: [external/gloo] closed", "Gloo all-reduce failed: [external/gloo] closed"),
    ],
)
def test_lines_lose_the_greeting_of_gloo(line, shown):
    assert without_greeting(line) == shown


def test_a_short_line_takes_no_large_buffer():
    """Otherwise the heap grows with each line (glibc)."""
    source, target = os.pipe()
    lines = output._whole_lines(source)
    os.write(target, b"first\n")
    assert next(lines) == b"first\n"
    tracemalloc.start()
    os.write(target, b"second\n")
    assert next(lines) == b"second\n"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    os.close(target)
    assert list(lines) == [] and peak < 10_000
    os.close(source)


def test_a_short_report_takes_no_large_buffer():
    report = ReportFile()
    report.write("beat")
    tracemalloc.start()
    assert report.read() == b"beat"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    report.close()
    assert peak < 10_000
