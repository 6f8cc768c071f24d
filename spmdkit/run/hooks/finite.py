"""The policies of `on_nonfinite` for non-finite losses, gradients, metrics and evaluations.

The step stores a code on the devices (`spmdkit.step.finite_check`); a skipped step does not change the state. The host
reads the codes at log steps and before a save. It then ends the run, rolls back and skips the batch permanently, or
reports the skipped step. A small program checks every leaf of the state periodically, because a moving average can
overflow.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.errors import NonFiniteError
from spmdkit.run import bad_batch
from spmdkit.run.hooks.base import Action, Hook, Rollback, RunView, Stop
from spmdkit.step import finite_check

LOOK_EVERY = 100
"""Minimum number of steps between two checks of the state. A check takes half a millisecond on the host."""
MAX_CODES = 512
"""Maximum number of codes stored on the devices; if exceeded, all but the newest `STEPS_IN_FLIGHT` are read."""
STEPS_IN_FLIGHT = 32
TOGETHER = 16
"""Number of codes that the devices combine before the host reads them."""


def make(config: Any) -> Hook:
    """Returns the hook that applies the policies."""
    policy = FiniteResults(config)
    codes: list[tuple[int, Any]] = []  # of steps, on the devices
    looked = [0]  # the step of the last state check
    saves_every = config.checkpoint.every_steps if config.checkpoint is not None else None

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> Action | None:
        if codes and step <= codes[-1][0]:
            codes.clear()  # a rollback
        if run.program.checks.code is not None:
            codes.append((step, run.program.checks.code))
        is_logged = run.is_log_step(step)
        saves = saves_every is not None and step % saves_every == 0
        if is_logged or saves or len(codes) >= MAX_CODES:
            num = len(codes) - (0 if is_logged or saves else STEPS_IN_FLIGHT)
            read = _joined_codes(codes[:num])
            del codes[:num]
            if is_logged:
                run.numbers(step, metrics)  # waits for the step, while the devices combine its code with the others
            for bad_step, bits in read():
                values = not_finite(run.numbers(step, metrics)) if bad_step == step else {}
                if (action := policy.to_step(run, bad_step, bits, values)) is not None:
                    codes.clear()
                    return action
        if not is_logged:
            return None
        policy.report(run, step, metrics)
        if 0 <= step - looked[0] < LOOK_EVERY:
            return None
        looked[0] = step
        return None if run.program.all_finite(state) else policy.to_state(run, step, state)

    def after_eval(run: RunView, step: int, values: Mapping[str, Any]) -> Action | None:
        if not (bad := not_finite(values)):
            return None
        what = f"the evaluation of step {step}: {format_metrics(bad)}"
        if config.on_nonfinite.evaluation == "continue":
            run.message(what)
            return None
        return Stop(NonFiniteError.exit_code, f"{what}. {EVALUATION_RULE}", known=True, save_first=True)

    return Hook("finite", order=10, after_step=after_step, after_eval=after_eval)


def _joined_codes(codes: list[tuple[int, jax.Array]]) -> Callable[[], list[tuple[int, int]]]:
    """Returns a function that waits for the devices and returns (step, bits) of the steps that are not finite on this
    process.

    The devices first combine the codes of several steps. If each device has a separate code, this takes 9 us per step
    on 8 CPU devices, instead of 83 us for separate reads (two cores, jax 0.10.2, 2026-11-25); if all have the same, 22
    instead of 33 us on 2 CPU devices (2026-11-28), so that few codes are read one by one and need no program.
    """
    groups = [codes[start : start + TOGETHER] for start in range(0, len(codes), TOGETHER)]
    joined = [_join([code for _, code in group]) for group in groups]
    return lambda: [
        (step, bits)
        for group, one in zip(groups, joined, strict=True)
        if one is None or _read(one)
        for step, code in group
        if (bits := _read(code))
    ]


def _join(codes: list[jax.Array]) -> jax.Array | None:
    """Combines several codes into one; returns None if separate reads are as fast."""
    if len(codes) <= (TOGETHER // 2 if codes[0].is_fully_replicated else 2):
        return None
    joined: jax.Array = _joined(*codes, *codes[-1:] * (TOGETHER - len(codes)))  # the same program for any number
    return joined


@jax.jit
def _joined(*codes: jax.Array) -> jax.Array:
    return functools.reduce(jnp.bitwise_or, codes)


def _read(code: jax.Array) -> int:
    """Returns the bitwise OR of an array's elements on this process, shard by shard."""
    num = 1 if code.is_fully_replicated else len(code.sharding.addressable_devices)
    parts = (np.asarray(code.addressable_data(i)) for i in range(num))
    return functools.reduce(operator.or_, (int(np.bitwise_or.reduce(part.ravel())) for part in parts))


class FiniteResults:
    """The actions of `on_nonfinite`, and their counts."""

    def __init__(self, config: Any):
        self._options, self._policies = config.on_nonfinite, config.policies()
        self._reports = "continue" in (self._options.loss, self._options.metrics)
        self._directory = config.resolved_run_dir() / "nonfinite"
        self._skipped, self._in_a_row, self._rollbacks = 0, 0, 0

    def to_step(self, run: RunView, step: int, bits: int, values: Mapping[str, float]) -> Action | None:
        """Returns the action for a step with the code `bits`. `values`: its non-finite metrics, if known."""
        names = [name for name, bit in finite_check.KINDS.items() if bits & bit]
        policies = {self._policies[name] for name in names}
        bad = ", ".join({"metrics": "a metric", "spike": "the loss"}.get(name, f"the {name}") for name in names)
        kind = "not finite" if bits & ~finite_check.SPIKE else "a spike"
        known = f" ({format_metrics(values)})" if values else ""
        what = f"{kind} at step {step}: {bad}{known}, after {bad_batch.named(run.program, step)}"
        self._dump(run, step)
        most = self._options.max_consecutive
        if "stop" in policies:
            return self._stop(run, what, self._known(run, bits, "stop"))
        if "rollback" in policies:
            self._rollbacks, is_known = self._rollbacks + 1, self._known(run, bits, "rollback")
            if self._rollbacks > most:
                return self._stop(run, f"{what}, after {most} rollbacks", is_known)
            run.message(what)
            return Rollback(step - 1, batches=(run.program.schedule.number(step),), known=is_known)
        self._in_a_row = self._in_a_row + 1 if step == self._skipped + 1 else 1
        self._skipped = step
        run.message(f"left out: {what}")
        run.events.write("skipped", step=step, batch=run.program.schedule.number(step), not_finite=names)
        if self._in_a_row < most:
            return None
        return self._stop(run, f"{self._in_a_row} steps in a row were left out: {what}", self._known(run, bits, "skip"))

    def to_state(self, run: RunView, step: int, state: Any) -> Action | None:
        """Returns the action for a state that is not finite."""
        what = f"the state is not finite at step {step}: '{run.program.non_finite_leaf(state)}'"
        if self._options.gradient != "continue":
            return self._stop(run, what, True)
        run.message(what)
        return None

    def report(self, run: RunView, step: int, metrics: Any) -> None:
        """Reports the non-finite metrics of a log step if the step does not check them."""
        bad = not_finite(run.numbers(step, metrics)) if self._reports else {}
        policy: Callable[[str], str] = lambda name: self._options.loss if name == "loss" else self._options.metrics
        if shown := {name: x for name, x in bad.items() if policy(name) == "continue"}:
            run.message(f"step {step}: {format_metrics(shown)}")

    def _known(self, run: RunView, bits: int, policy: str) -> bool:
        """Returns whether every process has the same values. A sharded gradient and the loss of one group differ."""
        if run.program.groups is not None:
            return False
        same = [name for name, bit in finite_check.KINDS.items() if bits & bit and name != "gradient"]
        code = run.program.checks.code
        return (code is not None and code.ndim == 0) or any(self._policies[name] == policy for name in same)

    def _stop(self, run: RunView, what: str, known: bool) -> Stop:
        before = run.last_logged
        run.events.write("nonfinite", step=run.step, why=what)
        return Stop(
            NonFiniteError.exit_code,
            f"{what}. The loss was {before.get('loss', 'not logged before')} at step {int(before.get('step', 0))}. "
            "Loss, gradient, metrics, parameters and the optimizer's state have to be finite. "
            f"{run.newest()} Lower the learning rate, set clip_norm, look at that batch (on_nonfinite: "
            "{save_batch: true} writes it to a file), or set on_nonfinite: skip or rollback.",
            known=known,
        )

    def _dump(self, run: RunView, step: int) -> None:
        if not self._options.save_batch or not run.cluster.is_main:
            return
        try:
            run.message(f"the batch of step {step}: {bad_batch.save(run.program, step, self._directory)}")
        except OSError as error:
            run.message(f"the batch of step {step} cannot be written to {self._directory}: {error.strerror or error}")


EVALUATION_RULE = (
    "The metrics of an evaluation have to be finite. Fix that metric, or set on_nonfinite: "
    "{evaluation: continue} to permit it."
)


def check_evaluation(config: Any, step: int, values: Mapping[str, Any]) -> None:
    """Checks an evaluation outside a run. Raises NonFiniteError if it is not finite, unless `on_nonfinite.evaluation`
    is `continue`."""
    if config.on_nonfinite.evaluation != "continue" and (bad := not_finite(values)):
        raise NonFiniteError(f"the evaluation of step {step}: {format_metrics(bad)}. {EVALUATION_RULE}")


def not_finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics with a NaN or an infinity; for an array its first such element."""
    flat = {name: np.ravel(x) for name, x in values.items()}
    return {name: float(x[~np.isfinite(x)][0]) for name, x in flat.items() if not np.isfinite(x).all()}


def format_metrics(bad: Mapping[str, Any]) -> str:
    """Returns metrics and their values, `'worst' is nan`."""
    return ", ".join(f"'{name}' is {value}" for name, value in bad.items())
