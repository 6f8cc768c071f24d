"""Searches the learning rate of the linear regression with Optuna (package `optuna`). Each trial is a run; a hook
reports its evaluations, and stops a run that Optuna prunes.

    python examples/search_with_optuna.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import linear_regression
import optax
import optuna

import spmdkit as sk


def objective(trial: optuna.Trial, folder: str | Path, steps: int, devices: str) -> float:
    """Returns the evaluation loss of a run in `folder`. Raises TrialPruned if Optuna stops it."""

    def report(run: object, step: int, values: dict[str, float]) -> sk.Stop | None:
        trial.report(values["loss"], step)
        return sk.Stop(why="Optuna prunes the trial") if trial.should_prune() else None

    hook = sk.Hook("optuna", after_eval=report)
    task = dataclasses.replace(linear_regression.task(), optimizer=optax.sgd, hooks=[hook])
    result = sk.train(
        task=task,
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1.0, log=True),
        steps=steps,
        batch_size=64,
        eval={"every_steps": steps // 5},
        devices=devices,
        mesh={"data": -1},
        log={"progress": "off"},
        run_dir=f"{folder}/trial_{trial.number}",
    )
    trial.set_user_attr("run_dir", str(result.run_dir))
    if trial.should_prune():
        raise optuna.TrialPruned
    return result.evaluation["loss"]


def search(folder: str | Path, trials: int, steps: int = 50, devices: str = "cpu:4") -> optuna.Study:
    """Returns the study of a number of trials, one after another in this process."""
    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    study.optimize(lambda trial: objective(trial, folder, steps, devices), n_trials=trials)
    return study


if __name__ == "__main__":
    best = search("runs/search", trials=20).best_trial
    print(f"loss {best.value:.4f} at learning rate {best.params['learning_rate']:.3g}: {best.user_attrs['run_dir']}")
