"""Records a profiler trace of the steps in `profile`. Each step is marked (`StepTraceAnnotation`), so that xprof shows
step times. The compiled programs are written next to the trace: `spmdkit profile RUN` reads the lines from them.

JAX names a trace by the host and the second. Several processes first write to `process_N/`, and then move their files
into one folder, with the number of the process in the name.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import threading
import time
from pathlib import Path
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
    active: list[Path] = []  # while a trace is recorded: its folder, and that of all processes
    marks: list[jax.profiler.StepTraceAnnotation] = []

    def before_step(run: RunView, step: int, state: Any) -> None:
        if step == first:
            jax.block_until_ready(state)
            _wait_for_plan()
            folders = _folders(run)
            jax.profiler.start_trace(str(folders[0]))
            active.extend(folders)
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
            folders = active.copy()
            active.clear()
            jax.profiler.stop_trace()
            _collect(*folders)

    return Hook("profile", order=35, before_step=before_step, after_step=after_step, end=stop)


def _folders(run: RunView) -> list[Path]:
    """Returns the folder in which JAX writes, and with several processes the one that receives the files of all."""
    folder = run.directory / "profile"
    if run.cluster.num_processes == 1:
        return [folder]
    name = run.cluster.from_main("name of the trace", lambda: time.strftime("%Y_%m_%d_%H_%M_%S"))
    return [folder / f"process_{run.cluster.process_index}", folder / "plugins" / "profile" / name]


def _collect(written: Path, common: Path | None = None) -> None:
    """Moves the files of this process, `process_N/plugins/profile/TIME/HOST.*`, to `common`."""
    if common is not None:
        common.mkdir(parents=True, exist_ok=True)
        for file in written.glob("plugins/profile/*/*"):
            file.rename(common / f"{written.name}_{file.name}")
        shutil.rmtree(written, ignore_errors=True)


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
