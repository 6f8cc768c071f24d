"""`spmdkit doctor`: what it prints, and its exit code."""

from pathlib import Path

import pytest

from spmdkit.errors import ConfigError
from spmdkit.tools import doctor, start

CONFIGS = Path(__file__).parents[2] / "configs"


def test_doctor_prints_problems_and_fails(monkeypatch, capsys):
    found = {"python": "3.11", "versions": {"jax": "0.10", "numpy": "2"}, "problems": ["sum 3"], "slow": ["a link"]}
    monkeypatch.setattr(doctor, "diagnose", lambda cluster, config, burn_s: found)
    assert doctor.examine(None, "5s", as_json=False) == 1
    expected = ["python    3.11", "versions  jax 0.10, numpy 2", "PROBLEM: sum 3", "slow: a link"]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_moment_counts_for_the_innermost_interval():
    nested = [
        ("outer", 0.0, 10.0),
        ("inner", 2.0, 5.0),
        ("innermost", 3.0, 4.0),
        ("inner", 6.0, 7.0),
        ("next", 10.0, 11.0),
    ]
    assert start.exclusive(nested[::-1]) == {"outer": 6.0, "inner": 3.0, "innermost": 1.0, "next": 1.0}


def test_start_requires_a_config(capsys):
    with pytest.raises(ConfigError, match="needs a config"):
        doctor.examine_start(None, [], as_json=False)


@pytest.mark.processes
def test_each_program_of_a_start_compiles_once():
    found = start.measure_start(CONFIGS / "linear_regression.yaml", ["devices=cpu:2"])
    names = [name for name, _ in found["programs"]]
    assert "jit(train_step)" in names and len(names) == len({*names})
    rows = dict(found["rows"])
    assert {"start of Python", "import jax", "trace", "compile (XLA)", "first step"} <= rows.keys()
    assert abs(sum(rows.values()) - found["total_s"]) < 0.02 * found["total_s"]
