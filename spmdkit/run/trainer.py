"""`Trainer`: trains a run from its first to its last state, by one SPMD step of all processes or by a parameter
server."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax

from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.data import DeviceBatches
from spmdkit.errors import OutOfMemoryError, Preempted
from spmdkit.faults.error_mapping import callbacks_that_raise
from spmdkit.foundation import phase, plugins
from spmdkit.foundation.exhausted_memory import is_exhausted
from spmdkit.plan.fit_check import check_start, out_of_memory, start_plan_thread
from spmdkit.program import allocator, saved_step
from spmdkit.program.compile_cache import Programs
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.run.actions import perform
from spmdkit.run.hook_runner import NOTHING
from spmdkit.run.hooks.base import Decision, Stop
from spmdkit.run.recovery.emergency_save import save_before_exit
from spmdkit.run.run import Run
from spmdkit.run.watchdog_callbacks import exit_on_stuck_callback
from spmdkit.step.state import TrainState

TRAINERS = {"parameter_server": "spmdkit.parameter_server.trainer"}
"""Name of a `sync` that is not part of the SPMD step -> the module with its `trainer()`."""

STOP_AND_SAVE = Decision(save=True, turn=Stop(Preempted.exit_code))
END_OF_DATA = Decision(evaluate=True, save=True, turn=Stop(why="train_data has ended (data.repeat: false)"))


class Trainer(Protocol):
    """The methods are called once each, in this order."""

    def program_config(self, config: Config) -> Config:
        """Returns the config of the program that evaluates and saves, and in the SPMD trainer also trains."""

    def open(self, config: Config, cluster: Cluster, program: Program, task: Task | None) -> Config:
        """Returns the config with the values that the program selected for `auto`. Raises ConfigError if this trainer
        cannot train the task."""

    def compile(self, run: Run, cache: Programs, limit_bytes: int | None, retain_memory: bool) -> None:
        """Prepares the first step. After this, a signal saves the state."""

    def train(self, run: Run, state: TrainState) -> tuple[TrainState, Stop | None]:
        """Returns the last state, and the action that stopped training early, or None."""


def trainer_of(config: Config) -> Trainer:
    """Returns the trainer of the config's `sync`."""
    module = None if plugins.is_reference(config.sync) else TRAINERS.get(plugins.split(config.sync)[0])
    if module is None:
        return SpmdTrainer()
    trainer: Trainer = importlib.import_module(module).trainer()
    return trainer


class SpmdTrainer:
    """All processes execute each step together, as one program."""

    def __init__(self) -> None:
        self._wait_for_plan: Callable[[], object] = lambda: None

    def program_config(self, config: Config) -> Config:
        return config

    def open(self, config: Config, cluster: Cluster, program: Program, task: Task | None) -> Config:
        return program.config

    def compile(self, run: Run, cache: Programs, limit_bytes: int | None, retain_memory: bool) -> None:
        program, cluster = run.program, run.cluster
        if cache.is_refused:
            run.message(f"note: compile cache {cache.description}")
        run.read_batches()  # concurrently with the compilation
        with run.reporter.progress.compiling(), phase.during("compile"):
            _load_saved(run)
            check_start(program, cluster, run.directory, limit_bytes)
            for other in program.other_shapes().values():  # before the first step, so that no later step waits
                _ = other.compiled
        run.events.write("compiled", step=run.step, **cache.programs())
        if retain_memory and cluster.devices[0].platform == "cpu":
            allocator.disable_trimming()
        self._wait_for_plan = start_plan_thread(program, cluster, run.directory, run.message, run.events.write)

    def train(self, run: Run, state: TrainState) -> tuple[TrainState, Stop | None]:
        assert run.batches is not None
        try:
            state, stopped = run_steps(run, state, run.batches)
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            with phase.during("compile"):
                raise OutOfMemoryError(out_of_memory(run.program, error, run.cluster.num_processes == 1)) from error
        if run.step == run.config.num_steps:
            self._wait_for_plan()
        return state, stopped


def _load_saved(run: Run) -> None:
    """Sets the compiled step of the program to that of `plan --save-compiled`, if every process has the same."""
    options = run.config.compile_cache
    if options is None or options.saved is None:
        return
    compiled, line = saved_step.load_step(run.program, run.config.folder / options.saved)
    found = run.cluster.gather("saved step", compiled is not None)
    if compiled is not None and not all(found):
        line = f"process {found.index(False)} has no saved step; the step is compiled"
    run.message(f"note: compile cache: {line}")
    if all(found) and compiled is not None:
        run.program.compiled = compiled


def run_steps(run: Run, state: TrainState, batches: DeviceBatches) -> tuple[TrainState, Stop | None]:
    """Returns the state after the last step, or after the step at which all processes agreed to stop, and the action
    that stopped training."""
    program, hooks, stop = run.program, run.hook_runner, None
    run.reporter.throughput.start()
    # Only user-defined hooks may hold a state that the next step donates.
    looks, program.may_be_donated = program.may_be_donated, program.may_be_donated and hooks.has_own
    try:
        hooks.call("begin", run, run.step, state)
        if (decision := hooks.decision_at_start()) is not NOTHING:
            state, batches, stop = perform(run, run.step, state, batches, decision)
        run.driver.after_step(run, run.step, state)
        with callbacks_that_raise(partial(exit_on_stuck_callback, run)):
            while stop is None and (item := next(batches, None)) is not None:
                step, batch, wait_s = item
                hooks.call("before_step", run, step, state)
                if (decision := hooks.more()) is not NOTHING:
                    state, following, stop = perform(run, run.step, state, batches, decision)
                    if stop is not None or following is not batches:  # a rollback: this batch belongs to a later step
                        batches = following
                        continue
                state, metrics = program.step(state, batch)
                if program.feed.is_empty(step) and not int(program.checks.rows):  # no process has a row
                    state, batches, stop = perform(run, run.step, state, batches, END_OF_DATA)
                    continue
                run.dispatched(step, metrics, wait_s, program.num_tokens(batch))
                hooks.after_step(run, step, state, metrics)
                if (decision := hooks.decision(step)) is not NOTHING:
                    state, batches, stop = perform(run, step, state, batches, decision)
                if stop is None:
                    run.driver.after_step(run, run.step, state)
        if stop is None and run.input_given_up:
            state, batches, stop = perform(run, run.step, state, batches, STOP_AND_SAVE)
    except Exception as error:
        save_before_exit(run, state, error)
        raise
    finally:
        program.may_be_donated = looks
        batches.close()
    hooks.call("end", run, run.step, state)
    return state, stop
