"""Two asynchronous workers reach the loss of SGD after as many applied updates, by stale gradients: `benchmarks/parameter_server.py converge`."""

import argparse
import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "parameter_server.py"


def converged(task, seeds):
    """Returns what the benchmark found of a task."""
    spec = importlib.util.spec_from_file_location("benchmark_of_parameter_servers", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark.converge(argparse.Namespace(tasks=[task], seeds=seeds, transport="threads"))[task]


@pytest.mark.parametrize(
    "task, seeds", [("line", 1), *(pytest.param(task, 3, marks=pytest.mark.slow) for task in ("line", "digits"))]
)
def test_two_workers_reach_the_loss_of_sgd_after_as_many_updates_most_of_them_stale(task, seeds):
    found = converged(task, seeds)
    assert len(found["seeds"]) == seeds and all(row["stale"] >= 0.5 for row in found["seeds"]), found
    assert found["ratio"] < 1.05, found
