"""Two asynchronous workers reach the loss of SGD after as many applied updates, by stale gradients:
`benchmarks/parameter_server.py converge`."""

import argparse
import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "parameter_server.py"


@pytest.fixture(scope="module")
def benchmark():
    """Returns the benchmark's module."""
    spec = importlib.util.spec_from_file_location("benchmark_of_parameter_servers", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "task, seeds", [("line", 1), *(pytest.param(task, 3, marks=pytest.mark.slow) for task in ("line", "digits"))]
)
def test_two_stale_workers_reach_the_loss_of_sgd(benchmark, task, seeds):
    found = benchmark.converge(argparse.Namespace(tasks=[task], seeds=seeds, transport="threads"))
    assert len(found[task]["seeds"]) == seeds and benchmark.missed("converge", found) == [], found


@pytest.mark.parametrize(
    "what, found, said",
    [
        ("equal", {"line": 0.0, "digits": 1e-6}, ()),
        ("equal", {"line": 0.0, "digits": 2e-5}, ("the largest relative difference is 2e-05",)),
        (
            "converge",
            {"line": {"ratio": 1.06, "seeds": [{"stale": 0.4}]}},
            ("loss of two workers", "stale updates is 0.4"),
        ),
        ("slow", {"ratio": {"worker 0": 1.1, "worker 1": 0.2}}, ()),
        ("slow", {"ratio": {"worker 0": 0.89, "worker 1": 0.2}}, ("the other worker's rate over what it was is 0.89",)),
        ("wire", {"push over plain": 0.5, "pull over plain": 0.8}, ()),
        (
            "wire",
            {"push over plain": 0.49, "pull over plain": float("nan")},
            ("a push", "a pull over a plain transfer is nan"),
        ),
    ],
)
def test_command_fails_when_a_bound_is_exceeded(benchmark, what, found, said, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, what, lambda options: found)
    monkeypatch.setattr("sys.argv", ["parameter_server.py", what])
    assert benchmark.main() == bool(said)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True)), lines
