"""`train`: one run from start to end. `evaluate`: the metrics of a checkpoint."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax

from spmdkit.checkpoint import Checkpoints
from spmdkit.cluster import Cluster, detect_cluster
from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.config import Config, load_config, replace_keys
from spmdkit.errors import CheckpointError, Preempted, RendezvousError
from spmdkit.faults import StopSignals, Watchdog, exit_process, report_and_exit, run_watchdog
from spmdkit.faults.heartbeat import SERVICE_LOST
from spmdkit.faults.injection.inject import inject_at_phases
from spmdkit.foundation import garbage, phase
from spmdkit.foundation.constants import COMPILE_ONLY, ERROR_FILE
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.run_status import unfinished
from spmdkit.foundation.trees import tree_bytes
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.plan.fit_check import check_state, common_limit
from spmdkit.program import allocator
from spmdkit.program.compile_cache import Programs, enable_cache
from spmdkit.program.feeds import with_streams
from spmdkit.program.opening import join_processes, open_program, task_of, with_hooks
from spmdkit.program.program import Program
from spmdkit.program.restore import checkpoints_of, restored
from spmdkit.program.task import Task
from spmdkit.run.actions import check_last, evaluate_if_missing, save
from spmdkit.run.driver import NO_DRIVER, Driver, TrainJob
from spmdkit.run.hooks.base import Stop
from spmdkit.run.recovery import restore, resume_check
from spmdkit.run.result import Result
from spmdkit.run.run import Run
from spmdkit.run.startup import consistency
from spmdkit.run.startup.health_checks import run_health_check
from spmdkit.run.startup.staleness import staleness_notes
from spmdkit.run.trainer import Trainer, trainer_of
from spmdkit.step.state import TrainState


@ignores_user_settings
def train(
    config: Config | str | Path | None = None,
    cluster: Cluster | None = None,
    task: Task | None = None,
    allow_change: Sequence[str] = (),
    reset: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Trains a config to its last step, from the newest checkpoint in its run directory or from the initial state.

    `sk.train(task=task, steps=100, mesh={"data": -1})` needs no file. A config without a file and without `run_dir`
    trains in a new directory, `Result.run_dir`; to continue, pass it as `run_dir`. A process that a launcher has
    started, or one of several, trains in `runs/run` instead, so that a restart continues.

    Args:
        config: a `Config`, or the path of its file; None: only `settings`.
        cluster: the joined processes; default: joins the processes of the environment.
        task: replaces the task of the config.
        settings: keys of the config with their values, which replace those of `config`.
        allow_change: settings that may differ from the checkpoint although they change the result: `seed`, `train_data`
            ...; `checkpoints`: none of the saved steps is left. See run/recovery/resume_check.py.
        reset: parts of the restored state that are initialized again: `opt_state`, `ema`, or patterns of parameters;
            see program/changed_state.py. A restart with the same value does not repeat it.

    Raises:
        ConfigError, CheckpointError: raised before anything in the directory changes.
        Preempted: a signal requested a stop; the state is saved.
        NonFiniteError, CheckpointWriteError, UserCodeError: see `spmdkit.errors`.
    """
    if config is None:
        config = Config(**settings)
    else:
        config = config if isinstance(config, Config) else load_config(config)
        config = replace_keys(config, settings) if settings else config
    resume_check.check_allowed(allow_change)
    joined = cluster or detect_cluster(os.environ, config.cluster.environment)
    retain_memory = allocator.limit_arenas(config.devices, os.environ, joined.num_processes)
    with StopSignals() as signals, in_new_directory(config) as config:
        job = TrainJob(config, cluster, task, tuple(allow_change), signals, retain_memory, tuple(reset))
        if config.elastic.in_process:
            result: Result = importlib.import_module("spmdkit.elastic.driver").train(job, train_once)
            return result
        return train_once(job, partial(join_cluster, job))


@contextmanager
def in_new_directory(config: Config) -> Iterator[Config]:
    """Yields the config with a new directory, `runs/run-1`, `runs/run-2` ..., if it has none and is not from a file."""
    spec = detect_cluster(os.environ, config.cluster.environment)
    is_restarted = ERROR_FILE in os.environ or spec.num_processes > 1
    if config.source is not None or config.run_dir is not None or is_restarted:
        yield config
        return
    for number in itertools.count(1):
        directory = config.folder / "runs" / f"run-{number}"
        with suppress(FileExistsError):
            directory.mkdir(parents=True)
            break
    try:
        yield replace_keys(config, {"run_dir": str(directory)})
    finally:
        with suppress(OSError):  # it has files unless the task was rejected
            directory.rmdir()


def train_once(job: TrainJob, join: Callable[[], tuple[Cluster, Config]], driver: Driver = NO_DRIVER) -> Result:
    """Trains with the processes from `join`. Phases: join, check, open, restore or initialize, compile, loop,
    finish."""
    signals = job.signals
    with signals.raise_on_signal(report_and_exit):
        cluster, config = join()
        signals.reinstall()  # JAX has just replaced the handler of SIGTERM
    signals.announce = cluster.is_main
    with ExitStack() as stack:
        watchdog = stack.enter_context(watchdog_context(config, cluster))
        inject_at_phases()
        cache = stack.enter_context(enable_cache(config.compile_cache, config.folder))
        stack.enter_context(driver.session(cluster, watchdog, signals))
        unsaved = stack.enter_context(ExitStack())
        unsaved.enter_context(signals.raise_on_signal(report_and_exit))
        with phase.during("import"):
            trainer = trainer_of(config)
            health, limit_bytes = check_processes(cluster, config)
            program = open_on_all_processes(config, cluster, job.task, limit_bytes, trainer)
            config = trainer.open(config, cluster, program, job.task)
            check_state(program, cluster, limit_bytes)
            if os.environ.get(COMPILE_ONLY):  # ends the process before it opens the run
                _ = program.step_bytes
                cluster.barrier("compiled")
                exit_process(0)
        run = stack.enter_context(
            Run(
                config,
                cluster,
                program,
                signals,
                watchdog,
                driver=driver,
                allow_change=job.allow_change,
                reset=job.reset,
            )
        )
        unsaved.enter_context(signals.raise_on_signal(report_and_exit, run_is_open=True))
        if health is not None:
            run.events.write("health_check", why=health)
        with phase.during("restore"):
            state = run.restore_or_init()
            consistency.same_state(cluster, run.step, state)
        if run.is_complete:
            evaluate_if_missing(run, state)
            end = f", where it stopped: {run.finished}" if run.finished else ""
            run.message(f"already finished: step {run.step} of {config.num_steps} is saved in {run.directory}{end}")
            run.leave_cluster()
            run.events.write("stopped", step=run.step, code=0, why="finished before")
            return Result(state, program, run, already_finished=True)
        log_run_start(run, state)
        trainer.compile(run, cache, limit_bytes, job.retain_memory)
        unsaved.close()
        garbage.collect_as_before()
        state, stopped = trainer.train(run, state)
        finish(run, state, stopped, cache)
        return Result(state, program, run)


def check_processes(cluster: Cluster, config: Config) -> tuple[str | None, int | None]:
    """Checks that all processes start from the same config, code and versions. Returns (result of the health check if
    the config enables it, memory limit of the devices)."""
    consistency.same_start(cluster, config)
    return run_health_check(cluster, config), common_limit(cluster)


def finish(run: Run, state: TrainState, stopped: Stop | None, cache: Programs) -> None:
    """Ends a run: the last state is finite and committed, the processes have left the cluster, the records are closed.

    Raises:
        Preempted: a signal or a hook stopped the run before its last step.
    """
    is_done = stopped is None or stopped.code == 0
    if is_done:
        check_last(run, state)
    run.finish(lambda: save(run, run.step, state))
    run.leave_cluster()
    if stopped is not None and stopped.code == Preempted.exit_code:
        raise _preempted(run, stopped)
    if stopped is not None:
        run.message(f"stopped at step {run.step}: {stopped.why}")
    run.events.write("compiled", step=run.step, **cache.programs())
    run.close_records("stopped", code=0, **({"why": stopped.why} if stopped else {}))
    if run.cluster.is_main and run.config.log.progress != "off":
        print(visible(f"report {run.directory / 'report.html'}"), flush=True)


def log_run_start(run: Run, state: TrainState) -> None:
    program, config, progress = run.program, run.config, run.reporter.progress
    devices = run.cluster.devices
    copies = 1 if program.groups is None else program.groups.num
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params)) // copies
    used = 1 if not config.mesh.sizes() else len(devices)
    progress.message(
        f"{num_params:,} parameters ({tree_bytes(state.params) / copies / 2**20:.1f} MiB) on {used} of {len(devices)} "
        f"{devices[0].platform} device{'s' * (len(devices) > 1)}, mesh {describe_mesh(program.sizes)}, "
        f"{run.cluster.num_processes} process{'es' * (run.cluster.num_processes > 1)}"
    )
    progress.message(f"run directory {run.directory}")
    stale = staleness_notes(config, program.abstract_state.opt_state)
    for note in (*run.cluster.notes, *program.notes, *stale, *run.driver.notes):
        progress.message(f"note: {note}")
    progress.start()


def _preempted(run: Run, stopped: Stop) -> Preempted:
    number = None if run.signals is None else run.signals.requested
    name = stopped.why or ("a signal to another process" if number is None else signal.Signals(number).name)
    run.close_records("preempted", signal=name, code=Preempted.exit_code)
    if run.checkpoints is None:
        return Preempted(
            f"stopped after step {run.step} by {name}. Nothing was saved: checkpoint is null in the config."
        )
    return Preempted(f"stopped after step {run.step} by {name}; saved. Start the same command again to continue.")


def join_cluster(job: TrainJob) -> tuple[Cluster, Config]:
    """Joins the processes of a job as its config requests; returns them and the config."""
    config = job.config
    if job.cluster is not None:
        return job.cluster, config
    return join_processes(config), config


@contextmanager
def watchdog_context(config: Config, cluster: Cluster) -> Iterator[Watchdog | None]:
    """Runs the watchdog, if the config enables it. If the coordination service ends, this process exits with 75."""
    board, folder = cluster.board("watch")
    with run_watchdog(config.watchdog, cluster.process_index, cluster.num_processes, board, folder) as watchdog:
        cluster.on_service_lost(partial(exit_without_service, watchdog))
        yield watchdog


def exit_without_service(watchdog: Watchdog | None) -> None:
    """Ends this process: by its watchdog, which knows the newest checkpoint and writes the event, if that runs."""
    if watchdog is None or not watchdog.report_service_lost():
        report_and_exit(RendezvousError(SERVICE_LOST))


def open_on_all_processes(
    config: Config,
    cluster: Cluster,
    task: Task | None = None,
    limit_bytes: int | None = None,
    trainer: Trainer | None = None,
) -> Program:
    """Returns the program of a config, the same on all processes. Prints the attempts of `auto` to standard error,
    unless progress is off."""
    quiet = not cluster.is_main or config.log.progress == "off"
    print_line = lambda line: None if quiet else print(visible(line), file=sys.stderr, flush=True)
    make_task = lambda: with_streams(task_of(config) if task is None else with_hooks(task, config), config)
    same_task = consistency.same_data(cluster, make_task, config.data.retries, samples=config.data.check != "off")
    opened = (trainer or trainer_of(config)).program_config(config)
    return consistency.same_program(
        cluster, lambda: open_program(opened, same_task, cluster.devices, limit_bytes, print_line)
    )


def evaluate(
    config: Config,
    cluster: Cluster,
    task: Task | None = None,
    step: int | None = None,
    best: bool = False,
    initial: bool = False,
    name: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """Returns (step, metrics) of a checkpoint in the config's run directory: of `step`, the best, or the newest; or of
    the state before step 1 (`initial`). `name`: one of several evaluation sets; None: all.

    A run that is training in the directory does not delete this checkpoint.

    Raises:
        CheckpointError: it does not exist, is damaged, or is of a different model.
    """
    function: Callable[[Program, TrainState], dict[str, Any]] = lambda program, state: program.eval(state, name)
    return on_checkpoint(config, cluster, function, task, step, best, initial)


@ignores_user_settings
def on_checkpoint(
    config: Config,
    cluster: Cluster,
    function: Callable[[Program, TrainState], Any],
    task: Task | None = None,
    step: int | None = None,
    best: bool = False,
    initial: bool = False,
) -> tuple[int, Any]:
    """Returns (step, `function(program, state)`) of a checkpoint; see `evaluate`."""
    with watchdog_context(config, cluster), enable_cache(config.compile_cache, config.folder):
        with phase.during("import"):
            consistency.same_start(cluster, config)
            program = open_on_all_processes(config, cluster, task)
        if initial:
            with phase.during("restore"):
                state = restore.state_before_step_1(cluster, program).state
            with phase.during("evaluation"):
                return 0, function(program, state)
        directory = checkpoints_of(config)
        checkpoints = Checkpoints(directory, is_main=False, num_processes=cluster.num_processes, cluster=cluster)
        with restore.chosen_for_all(cluster, checkpoints, step, best) as chosen:
            if chosen is None:
                raise CheckpointError(
                    f"{directory} holds no checkpoint. Evaluation needs one. Train first: spmdkit train "
                    f"{config.source}. The untrained model: spmdkit eval --initial {config.source}."
                )
            unfinished_run = unfinished(config.resolved_run_dir())
            if unfinished_run is not None and not unfinished_run.alive and cluster.is_main:
                print(visible(f"note: {unfinished_run.message()}"), file=sys.stderr, flush=True)
            with phase.during("restore"):
                state, *_ = restored(checkpoints, chosen, program)
            checkpoints.close()
        with phase.during("evaluation"):
            return chosen, function(program, state)
