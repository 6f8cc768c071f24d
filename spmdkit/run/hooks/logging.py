"""Writes the metrics of the first step, of every `log.every_steps` steps and of the last step. At other steps it only
advances the progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmdkit.run.hooks.base import Hook

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def make(config: Any) -> Hook:
    """Returns the hook that writes metrics."""

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> None:
        if not run.is_log_step(step):
            run.reporter.progress.advance(step)
            return
        numbers = run.numbers(step, metrics)
        run.report_saves()
        speed = run.reporter.throughput.snapshot(step)
        run.record_metrics(step, numbers, speed)

    return Hook("logging", order=40, after_step=after_step)  # type: ignore[arg-type]  # it gets a Run
