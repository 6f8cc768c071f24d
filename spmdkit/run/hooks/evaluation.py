"""Evaluates every `eval.every_steps` steps and after the last step."""

from __future__ import annotations

from typing import Any

from spmdkit.run.hooks.base import Action, Evaluate, Hook, RunView


def make(config: Any) -> Hook:
    """Returns the hook that requests evaluations."""
    every = config.eval.every_steps

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> Action | None:
        return Evaluate(known=True) if run.program.has_eval else None

    return Hook("evaluation", order=20, every=config.num_steps if every is None else every, after_step=after_step)
