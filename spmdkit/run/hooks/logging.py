"""Writes the metrics of the first step, of every `log.every_steps` steps and of the last step. At other steps it only
advances the progress bar.

Added to the metrics of the task: learning rate and gradient norm, the speed (not of the first step of a process), MFU
(FLOPs of the model's matrix products over the peak of the devices, once the plan of the step is written), the peak
memory of a device, and goodput.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmdkit.metrics import Goodput
from spmdkit.program.learning_rate import learning_rate
from spmdkit.program.memory import peak_memory
from spmdkit.run.hooks.base import Hook

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def make(config: Any) -> Hook:
    """Returns the hook that writes metrics."""
    goodput = Goodput()

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> None:
        if not run.is_log_step(step):
            run.reporter.progress.advance(step)
            return
        numbers = run.numbers(step, metrics)
        norm = run.program.gradient_norm()  # all processes
        run.report_saves()
        throughput = run.reporter.throughput
        before = throughput.trained_s
        speed = throughput.snapshot(step)
        share = goodput.add(throughput.trained_s - before)
        if not run.cluster.is_main:
            run.record_metrics(step, numbers, {})
            return
        more = {"learning_rate": learning_rate(run.config, state.opt_state, step), "gradient_norm": norm}
        if step > run.first_step:
            mfu = _mfu(run, speed)
            more |= {**speed, "mfu": mfu, "peak_memory_bytes": peak_memory(run.cluster.devices), "goodput": share}
        run.record_metrics(step, numbers, {name: x for name, x in more.items() if x is not None})
        for line in run.hook_runner.slow_hooks():
            run.message(line)

    state = lambda: dict(goodput.state)
    return Hook("logging", order=40, after_step=after_step, state=state, restore=goodput.restore)  # type: ignore[arg-type]  # it gets a Run


def _mfu(run: Run, speed: dict[str, float]) -> float | None:
    """Returns the share of the devices' peak that the model's products take; None before the plan is written."""
    at_peak_s, rate = run.program.seconds_at_peak, speed.get("examples_per_s")
    return None if at_peak_s is None or rate is None else at_peak_s * rate / run.config.largest_batch
