"""`spmdkit doctor`: what it prints, and its exit code."""

from spmdkit.tools import doctor


def test_doctor_prints_problems_and_fails(monkeypatch, capsys):
    found = {"python": "3.11", "versions": {"jax": "0.10", "numpy": "2"}, "problems": ["sum 3"], "slow": ["a link"]}
    monkeypatch.setattr(doctor, "diagnose", lambda cluster, config, burn_s: found)
    assert doctor.examine(None, "5s", as_json=False) == 1
    expected = ["python    3.11", "versions  jax 0.10, numpy 2", "PROBLEM: sum 3", "slow: a link"]
    assert capsys.readouterr().out.splitlines() == expected
