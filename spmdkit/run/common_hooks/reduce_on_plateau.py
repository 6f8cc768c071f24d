"""Multiplies the learning rate by `factor` after `patience` values of a metric without an improvement by more than
`min_delta`, then waits for `cooldown` values; it never goes below `min_scale` of the schedule.

`split: eval` follows a metric of the evaluation, on the host; the factor is a leaf of the optimizer's state and takes
effect before the next step. `split: train` follows the training loss, its mean over `every` steps, on the devices:
`optax.contrib.reduce_on_plateau`. Both scale the optimizer's updates (PyTorch: ReduceLROnPlateau).
"""

from __future__ import annotations

from typing import Any, Literal

import optax

from spmdkit.errors import ConfigError
from spmdkit.program.learning_rate import scaled_updates, with_scale
from spmdkit.run.common_hooks.improvement import Improvement, Mode
from spmdkit.run.hooks.base import Action, Hook, Metrics, ReplaceState, RunView

NAME = "reduce_on_plateau"


def make(
    metric: str = "loss",
    mode: Mode = "min",
    factor: float = 0.1,
    patience: int = 3,
    cooldown: int = 0,
    split: Literal["eval", "train"] = "eval",
    every: int = 1,
    min_delta: float = 0.0,
    min_scale: float = 0.0,
) -> Hook:
    """Returns the hook."""
    if not 0 < factor < 1:
        raise ConfigError(f"{NAME}: factor is {factor!r}. It reduces the learning rate. Write factor: 0.1.")
    if patience < 1 or cooldown < 0 or every < 1:
        raise ConfigError(
            f"{NAME}: patience is {patience!r}, cooldown {cooldown!r} and every {every!r}. patience and every are at "
            "least 1, cooldown is at least 0. Write patience: 3."
        )
    if split == "train":
        if (metric, mode) != ("loss", "min"):
            raise ConfigError(f"{NAME}: split: train follows the loss, found metric: {metric}, mode: {mode}. Use eval.")
        plateau = optax.contrib.reduce_on_plateau(
            factor, patience, rtol=0.0, atol=min_delta, cooldown=cooldown, accumulation_size=every, min_scale=min_scale
        )
        return Hook(NAME, optimizer=lambda inner: optax.chain(inner, plateau))
    if split != "eval" or every != 1:
        raise ConfigError(f"{NAME}: split is {split!r} and every {every!r}. split is eval or train; every is of train.")
    return _of_evaluations(Improvement(NAME, metric, mode, min_delta), factor, patience, cooldown, min_scale)


def _of_evaluations(improvement: Improvement, factor: float, patience: int, cooldown: int, min_scale: float) -> Hook:
    plan: dict[str, Any] = {"scale": 1.0, "cooldown": 0}
    in_state = [1.0]  # the factor in the optimizer's state; empty: unknown

    def begin(run: RunView, step: int, state: Any) -> None:
        improvement.check(run)

    def after_eval(run: RunView, step: int, values: Metrics) -> None:
        since = improvement.add(step, values)
        if plan["cooldown"]:
            plan["cooldown"] -= 1
            improvement.state["since"] = 0
        elif since >= patience and plan["scale"] > min_scale:
            plan.update(scale=max(plan["scale"] * factor, min_scale), cooldown=cooldown)
            run.message(f"{NAME}: learning rate x {plan['scale']:.3g}: {improvement}")
            improvement.state["since"] = 0

    def before_step(run: RunView, step: int, state: Any) -> Action | None:
        if in_state == [plan["scale"]]:
            return None
        in_state[:] = [plan["scale"]]
        return ReplaceState(state.replace(opt_state=with_scale(state.opt_state, plan["scale"])))

    def restore(saved: dict[str, Any]) -> None:
        improvement.state.update(saved["improvement"])
        plan.update(saved["plan"])
        in_state.clear()

    return Hook(
        NAME,
        begin=begin,
        before_step=before_step,
        after_eval=after_eval,
        state=lambda: {"improvement": dict(improvement.state), "plan": dict(plan)},
        restore=restore,
        optimizer=lambda inner: optax.chain(inner, scaled_updates()),
    )
