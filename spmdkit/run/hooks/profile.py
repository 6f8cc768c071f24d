"""Records a profiler trace of the steps in `profile`. Each step is marked (`StepTraceAnnotation`), so that xprof shows
step times. The compiled programs are written next to the trace: `spmdkit profile RUN` reads the lines from them."""

from __future__ import annotations

import contextlib
import gzip
import threading
from typing import Any

import jax

from spmdkit.foundation.constants import PLAN_THREAD
from spmdkit.foundation.timeouts import PLAN_CLOSE_S
from spmdkit.run.hooks.base import Hook, RunView


def make(config: Any) -> Hook | None:
    """Returns the hook that starts and stops the trace; None if the config requests none."""
    if config.profile is None:
        return None
    first, last = config.profile.steps
    active: list[bool] = []  # not empty while the trace is recorded
    marks: list[jax.profiler.StepTraceAnnotation] = []

    def before_step(run: RunView, step: int, state: Any) -> None:
        if step == first:
            jax.block_until_ready(state)
            _wait_for_plan()
            jax.profiler.start_trace(str(run.directory / "profile"))
            active.append(True)
        if active:
            marks.append(jax.profiler.StepTraceAnnotation("train", step_num=step))
            marks[-1].__enter__()

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> None:
        while marks:
            marks.pop().__exit__(None, None, None)
        if active and step == last:
            jax.block_until_ready(metrics)
            stop()
            _write_programs(run)
            run.message(f"profile of steps {first} to {last}: {run.directory / 'profile'}")

    def stop(*_: Any) -> None:
        if active:
            active.clear()
            jax.profiler.stop_trace()

    return Hook("profile", order=35, before_step=before_step, after_step=after_step, end=stop)


def _write_programs(run: RunView) -> None:
    """Writes the text of each compiled program that the run calls as `profile/NAME.hlo.gz`."""
    program = run.program
    for name, compiled in [("step", program.compiled), *((p.name, p.compiled) for p in program.phases)]:
        if run.cluster.is_main and (text := compiled.as_text()):
            with contextlib.suppress(OSError), gzip.open(run.directory / "profile" / f"{name}.hlo.gz", "wt", 1) as file:
                file.write(text)


def _wait_for_plan() -> None:
    """Waits until the plan of the run is written, so that its thread is not in the trace."""
    for thread in threading.enumerate():
        if thread.name == PLAN_THREAD:
            thread.join(PLAN_CLOSE_S)
