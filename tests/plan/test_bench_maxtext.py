"""The comparison with MaxText: limits, and the committed table. The measurement: `make bench-maxtext`."""

import gzip
import importlib.util
from pathlib import Path

import pytest

from tests.support.forms import slow_except

FOLDER = Path(__file__).parents[2] / "benchmarks" / "maxtext"
TEXT = Path(__file__).with_name("texts") / "fsdp_step.txt.gz"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare", FOLDER / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(compare, name="v5p/fsdp/1b", **ours):
    """Returns a measurement of a cell in which every ratio is one, except for those of `ours`."""
    cell = compare.cells()[name]
    side = dict.fromkeys(compare.FIGURES, 1.0) | {"attention": "splash", "versions": {}}
    versions = {"maxtext": "1", "jax": "1", "libtpu": "1", "jax-cuda13-pjrt": "1"}
    row = {"settings": compare.settings_of(cell), "date": "2026-11-27"}
    return name, {name: row | {"spmdkit": side | ours, "maxtext": side | {"versions": versions}}}


def test_the_page_is_that_of_the_results(compare):
    assert compare.page(compare.read_results(), compare.known()) == compare.PAGE.read_text()


STRATEGIES = ("fsdp/7b", "data-tensor/7b", "context/7b", "experts/8x1b", "pipeline/7b")
CELLS = [f"{chip}/{strategy}" for chip in ("v5p", "v6e", "h100") for strategy in STRATEGIES]
CELLS.remove("h100/context/7b")  # MaxText has no context parallelism on GPUs here
FAST = {"v6e/fsdp/7b", "v5p/data-tensor/7b", "v6e/context/7b", "h100/experts/8x1b", "v5p/pipeline/7b"}
"""Each strategy and each chip."""


@pytest.mark.parametrize("name", slow_except(FAST, CELLS))
def test_saved_programs_give_the_committed_figures(compare, name):
    results, cells = compare.read_results(), compare.cells()
    for side in compare.SIDES:
        found = compare.saved_figures(name, side, cells[name])
        for figure in compare.FIGURES:
            assert found[figure] == pytest.approx(results[name][side][figure], rel=1e-9)


def test_every_cell_with_goals_is_measured(compare):
    assert [name for name in compare.measured(compare.read_results()) if compare.has_goals(name)] == CELLS


def test_committed_ratios_above_the_limit_have_causes(compare):
    results = compare.read_results()
    assert compare.unexplained(results, compare.known()) == []
    high = {(name, figure) for name, figure, _ in compare.above(results)}
    assert {(name, figure) for name, of in compare.known().items() for figure in of} == high


@pytest.mark.parametrize(
    ("name", "figure", "ratio", "limit"),
    [
        ("v5p/fsdp/1b", "step_s", 1.05, None),
        ("v5p/fsdp/1b", "step_s", 1.06, 1.05),
        ("v5p/fsdp/7b", "step_s", 1.001, 1.0),
        ("v6e/experts/8x1b", "flops", 1.01, None),
        ("h100/pipeline/7b", "flops", 1.02, 1.01),
        ("v5e/fsdp/7b", "flops", 1.02, None),
    ],
)
def test_a_ratio_above_its_limit_is_marked(compare, name, figure, ratio, limit):
    _, results = measured(compare, name, **{figure: ratio})
    assert (f"**{ratio:.3f}**" in compare.page(results, {})) == (limit is not None)
    said = f"{name}: {compare.FIGURES[figure][0]} {ratio:.3f} of MaxText's, the limit is {limit}"
    assert compare.unexplained(results, {}) == ([said] if limit else [])
    assert compare.unexplained(results, {name: {figure: "a cause"}}) == []


def test_only_small_exposed_times_are_not_compared(compare):
    _, small = measured(compare, exposed_s=0.009, step_s=1.0)
    assert compare.unexplained(small, {}) == []
    next(iter(small.values()))["maxtext"]["exposed_s"] = 0.001
    assert compare.unexplained(small, {}) == []
    next(iter(small.values()))["spmdkit"]["exposed_s"] = 0.011
    assert len(compare.unexplained(small, {})) == 1


def test_a_cell_with_other_settings_is_not_measured(compare):
    name, results = measured(compare)
    second = list(compare.cells())[1]
    results |= {second: {**results[name], "settings": {}}}
    assert f"| {second} | not run |" in compare.page(results, {})


def test_figures_are_read_from_a_saved_step(compare):
    places = [[x, y, z] for z in range(2) for y in range(2) for x in range(2)]
    summary = {"axes": {"fsdp": 8}, "coords": places, "slices": [0] * 8, "cpu_s": 1, "versions": {}}
    summary["memory"] = {"peak_memory_in_bytes": 7}
    found = compare.figures(summary, gzip.decompress(TEXT.read_bytes()).decode(), "tpu:v5p:2x2x2")
    assert all(found[figure] > 0 for figure in compare.FIGURES) and found["loops_of_unknown_length"] == 0
