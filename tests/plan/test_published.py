"""Step times that others have published: the list, the predictions from saved programs, the page, the error bars."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from spmdkit.plan.error_bars import ERROR_BARS
from tests.support.forms import slow_except

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
published = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(published)

RUNS = {run["name"]: run for run in published.published_runs()}
RESULTS = json.loads(published.RESULTS.read_text())
ROWS = [row for row in published.rows() if row.predicted_s]
FIRST = ("16b-v5e-256", "32b-v5p-128", "llama3.1-70b-tpu7x-128")
TPU = [row.run["name"] for row in ROWS if published.kind_of(row.run) == "tpu"]


def test_each_run_states_source_shape_and_machine():
    fields = {"source", "target", "model", "batch_per_device", "sequence", "remat", "mesh", "step_s", "fitted"}
    assert len(RUNS) >= 20 and all(fields <= run.keys() for run in RUNS.values())
    assert sum(run["fitted"] for run in RUNS.values()) == 11
    for run in RUNS.values():
        assert run["published"].keys() & {"step_s", "tflops_per_s", "tokens_per_s"}
        published.parse_target(run["target"])


@pytest.mark.parametrize("name", slow_except([*FIRST, "llama2-7b-dgx-h100"], list(RESULTS)))
def test_saved_programs_give_the_listed_prediction(name):
    assert published.predicted_s(RUNS[name]) == pytest.approx(RESULTS[name]["predicted_s"], rel=1e-4)


@pytest.mark.slow
def test_fits_without_a_run_are_current():
    assert published.results() == RESULTS


def test_page_is_current():
    assert published.PAGE.read_text() == published.page()


def test_error_bars_are_those_of_the_runs():
    assert published.error_bars() == {kind: (bar.relative, bar.runs) for kind, bar in ERROR_BARS.items()}


def test_saved_programs_are_small():
    sizes = [path.stat().st_size for path in published.FOLDER.glob("*.gz")]
    assert len(sizes) == len(RESULTS) and sum(sizes) < 0.2e6 * len(sizes)


def test_shortened_text_predicts_the_same_time():
    name = TPU[0]
    text = gzip.decompress((published.FOLDER / f"{name}.txt.gz").read_bytes()).decode().partition("\n")[2]
    assert published.shortened(text) == text
