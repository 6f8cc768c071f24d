"""A search with Optuna over runs of spmdkit, where Optuna is installed (`make extras`)."""

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.optuna


def test_a_search_trains_and_prunes(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    study = importlib.import_module("search_with_optuna").search(tmp_path, trials=10)
    states = [trial.state for trial in study.trials]
    assert states.count(optuna.trial.TrialState.PRUNED) >= 1 and len(states) == 10
    assert all(
        trial.state in (optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.COMPLETE) for trial in study.trials
    )
    assert study.best_value < 0.02
    for trial in study.trials:
        lines = [
            json.loads(line) for line in (tmp_path / f"trial_{trial.number}/metrics.jsonl").read_text().splitlines()
        ]
        losses = {line["step"]: line["loss"] for line in lines if line.get("split") == "eval"}
        assert trial.intermediate_values == losses
        assert (max(losses) < 50) == (trial.state is optuna.trial.TrialState.PRUNED)
    assert study.best_trial.user_attrs["run_dir"] == str(tmp_path / f"trial_{study.best_trial.number}")
