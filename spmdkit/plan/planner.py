"""`plan_on`: the plan of a config on an opened target. `PlanProcesses`: plans of variants, each in a separate process.

JAX creates its devices once per process, so that each target has its own process (`spmdkit plan ... --json`). A crash
of the compiler ends only its plan. On a local accelerator a second process could not allocate memory: variants are
planned one after another in this process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmdkit.compat.cache import without_compilation_cache
from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.config import Config, replace_keys, to_yaml
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.formatting import name_axes, visible
from spmdkit.foundation.timeouts import PLAN_WORKER_S
from spmdkit.launch.process import start
from spmdkit.plan.document import Document, plan_program
from spmdkit.plan.machine.calibrate import with_measured
from spmdkit.plan.machine.compiler_process import compiler_environment, in_compiler_process
from spmdkit.plan.machine.gpu_devices import is_installed
from spmdkit.plan.machine.target import Target, parse_target
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.saved_step import save_step

MAX_WORKERS = 4
Changes = Mapping[str, Any]
Planner = Callable[[Changes], Document | str]
"""Changes of a config (dotted keys) -> its plan, or why it has none."""


@ignores_user_settings
def plan_on(config: Config, machine: Target, save: Path | None = None) -> Document:
    """Returns the plan of a config on an opened target, with measured rates if there are any. `save`: folder to write
    the compiled step to, if it fits."""
    if not machine.devices:
        return in_compiler_process(_plan_apart, machine, config)
    machine, call_s = with_measured(machine)
    with contextlib.nullcontext() if save is None else without_compilation_cache():
        program = open_program(config, task_of(config), machine.devices, machine.memory_limit_bytes, log)
        document = plan_program(program, machine, call_s)
        if save is not None and document["fits"]:
            save_step(program, save)
    return document


def _plan_apart(machine: Target, config: Config) -> Document:
    name_axes(config.roles)  # as when the config is read
    return plan_on(config, machine)


def log(line: str) -> None:
    """Prints a line of progress on standard error."""
    print(visible(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def planner_on(config: Config, target: Target) -> Iterator[tuple[Planner, int]]:
    """Context with the function that plans changes of a config on an opened target, and the number of concurrent
    calls."""
    if target.is_here and target.chip.kind != "cpu":
        yield lambda changes: _in_process(replace_keys(config, changes), target), 1
        return
    with PlanProcesses(config) as processes:
        yield lambda changes: processes(changes, target.name), num_workers()


def _in_process(config: Config, target: Target) -> Document | str:
    try:
        return plan_on(config, target)
    except (SpmdkitError, jax.errors.JaxRuntimeError) as error:
        return str(error).splitlines()[0]


def num_workers() -> int:
    """Returns the number of plans that are computed concurrently: as many as there are cores, at most `MAX_WORKERS`."""
    return max(1, min(MAX_WORKERS, os.cpu_count() or 1))


class PlanProcesses:
    """Plans variants of a config, or a `file.py:make`, each call in a separate process. A context: at its end, running
    processes are killed."""

    def __init__(self, subject: Config | str):
        self._folder = tempfile.TemporaryDirectory(prefix="spmdkit-plan-")
        self._running: set[subprocess.Popen[str]] = set()
        if isinstance(subject, str):
            self._subject = subject
            return
        file = Path(self._folder.name) / f"{subject.source.stem if subject.source else 'config'}.yaml"
        file.write_text(to_yaml(subject, absolute_paths=True))
        self._subject = str(file)

    def __call__(self, changes: Changes, target: str | None) -> Document | str:
        """Returns the plan of a variant, or why there is none. `target`: None: the devices of the config."""
        overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        command = [sys.executable, "-m", "spmdkit", "plan", self._subject, *overrides, "--json"]
        command += [] if target is None else ["--target", target]
        process = start(
            command, env=self._environment(target), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._running.add(process)
        try:
            out, errors = process.communicate(timeout=PLAN_WORKER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"its compilation took longer than {PLAN_WORKER_S} s"
        finally:
            self._running.discard(process)
        try:
            plan: Document = json.loads(out)
            return plan
        except ValueError:
            lines = [line for line in errors.splitlines() if line.strip()]
            return lines[-1] if lines else f"the compiler ended with code {process.returncode}"

    def _environment(self, target: str | None) -> dict[str, str] | None:
        """Returns the environment of the process that plans a target: that of the GPU compiler, if it is for GPUs."""
        with contextlib.suppress(ConfigError):  # which that process raises again
            if target is not None and parse_target(target).chip.kind == "gpu" and is_installed():
                return compiler_environment(Path(tempfile.mkdtemp(dir=self._folder.name)))
        return None

    def __enter__(self) -> PlanProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._running):
            process.kill()
        self._folder.cleanup()


def call_all(calls: Sequence[Callable[[], Any]], workers: int) -> None:
    """Makes all calls, `workers` at a time. An exception of one, or an interrupt, cancels those that have not begun."""
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        for done in [pool.submit(call) for call in calls]:
            done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # running calls end when their processes are killed
