"""Training from beginning to end: restore or init, step, log, evaluate, save, stop."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax

from spmdkit import compat
from spmdkit.checkpoint import Checkpoints
from spmdkit.cluster import Cluster, detect_cluster, join
from spmdkit.compat import membership as compat_membership
from spmdkit.config import Config, load_config, replace_keys
from spmdkit.data import DeviceBatches
from spmdkit.elastic import Membership, ending, membership_from_env
from spmdkit.errors import CheckpointError, ConfigError, Preempted
from spmdkit.faults import StopSignals, Watchdog, leave, report_and_leave, watching
from spmdkit.faults.error_mapping import callbacks_that_raise
from spmdkit.foundation import phase
from spmdkit.foundation.constants import COMPILE_ONLY
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.run_status import unfinished
from spmdkit.foundation.trees import tree_bytes
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.plan.fit_check import check_start, check_state, common_limit, start_plan_thread
from spmdkit.program import allocator
from spmdkit.program.compile_cache import Programs, kept
from spmdkit.program.opening import open_program, task_of, with_hooks
from spmdkit.program.program import Program
from spmdkit.program.restore import restored
from spmdkit.program.task import Task
from spmdkit.run import parameter_server
from spmdkit.run.actions import check_last, perform, save
from spmdkit.run.emergency_save import keep_work
from spmdkit.run.hook_runner import NOTHING
from spmdkit.run.hooks.base import Decision, Stop
from spmdkit.run.recovery import restore, resume_check
from spmdkit.run.run import Run
from spmdkit.run.startup import bucket, consistency
from spmdkit.run.startup.health import devices_are_well
from spmdkit.run.startup.standby import warm_up
from spmdkit.run.watchdog_callbacks import leave_stuck_callback
from spmdkit.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Result:
    """What `train` returns.

    Attributes:
        state: the state after the last step.
        program: the program that trained it.
        run: the run's records, closed.
        already_finished: the run had been finished before.
    """

    state: TrainState
    program: Program
    run: Run
    already_finished: bool = False

    @property
    def evaluation(self) -> dict[str, float] | None:
        """The metrics of the last evaluation in this process, or None."""
        return self.run.last_evaluation


def train(
    config: Config | str | Path,
    cluster: Cluster | None = None,
    task: Task | None = None,
    allow_change: Sequence[str] = (),
) -> Result:
    """Trains a config to its last step, from the newest checkpoint in its run directory or from the start.

    Args:
        config: a `Config`, or the path of its file.
        cluster: the joined processes; default: joins those that the environment names.
        task: instead of the one that the config names.
        allow_change: what may be other than when the run was saved although it makes the run another one: `seed`, `train_data`
            ...; see run/recovery/resume_check.py.

    Raises:
        ConfigError, CheckpointError: said before anything is changed in the directory.
        Preempted: a signal asked to stop; the state is saved.
        NonFiniteError, CheckpointWriteError, UserCodeError: see `spmdkit.errors`.
    """
    if not isinstance(config, Config):
        config = load_config(config)
    resume_check.check_allowed(allow_change)
    one_arena = allocator.one_arena(config.devices, os.environ)
    membership = membership_from_env(os.environ, config.elastic) if cluster is None else None
    if config.elastic.in_process and not compat.backends_initialized():
        compat_membership.reduce_one_by_one()
    with StopSignals() as signals:
        while True:
            try:
                return _train_generation(config, cluster, task, allow_change, signals, one_arena, membership)
            except Exception as error:
                if membership is None or not membership.takes(error):
                    raise
            membership.leave()  # now that nobody holds the frames of the error


def _train_generation(
    config: Config,
    cluster: Cluster | None,
    task: Task | None,
    allow_change: Sequence[str],
    signals: StopSignals,
    one_arena: bool,
    membership: Membership | None,
) -> Result:
    """Trains as long as the processes stay the same."""
    with signals.nothing_to_save(report_and_leave):
        if membership is None:
            cluster = cluster or join_as(config)
        else:
            cluster, config = _join_generation(config, membership)
        signals.again()  # JAX has just taken SIGTERM
    signals.announce = cluster.is_main
    with (
        watched(config, cluster) as watchdog,
        kept(config.compile_cache, config.folder) as cache,
        ending(membership, watchdog, signals),
    ):
        if membership is not None:
            membership.joined(cluster)
        return _trained(config, cluster, task, allow_change, signals, watchdog, one_arena, cache, membership)


def _join_generation(config: Config, membership: Membership) -> tuple[Cluster, Config]:
    """Returns the processes of the next generation, joined, and the config as it is with so many."""
    spec, generation, overrides = membership.place(
        detect_cluster(os.environ, config.cluster.environment), lambda: warm_up(config)
    )
    limit_s = config.watchdog.longest_timeout_s if config.watchdog else None
    cluster = join(spec, config.devices, limit_s, config.cluster.interface, generation)
    return cluster, replace_keys(config, {key: int(value) for key, value in (each.split("=") for each in overrides)})


def _trained(
    config: Config,
    cluster: Cluster,
    task: Task | None,
    allow_change: Sequence[str],
    signals: StopSignals,
    watchdog: Watchdog | None,
    one_arena: bool,
    cache: Programs,
    membership: Membership | None = None,
) -> Result:
    with signals.nothing_to_save(report_and_leave), phase.during("import"):
        consistency.same_start(cluster, config)
        found_well = devices_are_well(cluster, config)
        limit_bytes = common_limit(cluster)
        program = open_on_all_processes(config, cluster, task, limit_bytes)
        servers = parameter_server.opened(config, cluster, program, task)
        config = parameter_server.settled(config, program)  # with auto settled
        check_state(program, cluster, limit_bytes)
        if os.environ.get(COMPILE_ONLY):
            _ = program.step_bytes  # before anything of the run is opened
            cluster.barrier("compiled")
            leave(0)
    with (
        ExitStack() as unsaved,
        Run(config, cluster, program, signals, watchdog, membership=membership, allow_change=allow_change) as run,
    ):
        unsaved.enter_context(signals.nothing_to_save(report_and_leave, run_is_open=True))
        if found_well is not None:
            run.events.write("health_check", why=found_well)
        with phase.during("restore"):
            state = run.restore_or_init()
            consistency.same_state(cluster, run.step, state)
        if run.step >= config.steps or run.finished is not None:
            _say_finished(run)
            return Result(state, program, run, already_finished=True)
        _introduce(run, state)
        if servers is not None:
            unsaved.close()
            state, stopped = parameter_server.run_servers(run, state, servers)
        else:
            state, stopped = _compiled_and_run(run, state, unsaved, limit_bytes, one_arena, cache)
        if stopped is None or stopped.code == 0:
            check_last(run, state)
        run.finish(lambda: save(run, run.step, state))
        run.part()
        if stopped is not None and stopped.code == Preempted.exit_code:
            raise _preempted(run, stopped)
        if stopped is not None:
            run.message(f"stopped at step {run.step}: {stopped.why}")
        run.events.write("compiled", step=run.step, **cache.programs())
        run.tell("stopped", code=0, **({"why": stopped.why} if stopped else {}))
        _conclude(run)
    return Result(state, program, run)


def _compiled_and_run(
    run: Run, state: TrainState, unsaved: ExitStack, limit_bytes: int | None, one_arena: bool, cache: Programs
) -> tuple[TrainState, Stop | None]:
    program, cluster = run.program, run.cluster
    if cache.is_refused:
        run.message(f"note: compile cache {cache.said}")
    # Opened first, so that the data is read while the step compiles.
    with program.stream(run.step + 1) as run.batches:
        with run.reporter.progress.compiling(), phase.during("compile"):
            check_start(program, cluster, run.directory, limit_bytes)
        run.events.write("compiled", step=run.step, **cache.programs())
        if one_arena and cluster.devices[0].platform == "cpu":
            allocator.keep_memory()
        wait_for_plan = start_plan_thread(program, cluster, run.directory, run.message, run.events.write)
        unsaved.close()
        state, stopped = run_steps(run, state, run.batches)
    if run.step == run.config.steps:
        wait_for_plan()
    return state, stopped


STOP_AND_SAVE = Decision(save=True, turn=Stop(Preempted.exit_code))


def _say_finished(run: Run) -> None:
    end = f", where it stopped: {run.finished}" if run.finished else ""
    run.message(f"already finished: step {run.step} of {run.config.steps} is saved in {run.directory}{end}")
    run.part()
    run.events.write("stopped", step=run.step, code=0, why="finished before")


def run_steps(run: Run, state: TrainState, batches: DeviceBatches) -> tuple[TrainState, Stop | None]:
    """Returns the state after the last step, or after the step at which all processes agreed to stop, and what stopped
    it."""
    program, due, stop = run.program, run.hook_runner, None
    run.reporter.throughput.start()
    due.call("begin", run, run.step, state)
    looks, program.may_be_donated = program.may_be_donated, program.may_be_donated and due.has_own
    membership = run.membership
    try:
        if membership is not None:
            membership.after_step(run, run.step, state)
        with callbacks_that_raise(partial(leave_stuck_callback, run)):
            while stop is None and (taken := next(batches, None)) is not None:
                step, batch, wait_s = taken
                due.before_step(run, step, state)
                state, metrics = program.step(state, batch)
                run.dispatched(step, metrics, wait_s)
                due.after_step(run, step, state, metrics)
                if (decision := due.decision(step)) is not NOTHING:
                    state, batches, stop = perform(run, step, state, batches, decision)
                if membership is not None and stop is None:
                    membership.after_step(run, run.step, state)
        if stop is None and run.input_given_up:
            state, batches, stop = perform(run, run.step, state, batches, STOP_AND_SAVE)
    except Exception as error:
        if membership is None or not membership.takes(error):
            keep_work(run, state, error)
        raise
    finally:
        program.may_be_donated = looks
        batches.close()
    due.call("end", run, run.step, state)
    return state, stop


def _introduce(run: Run, state: TrainState) -> None:
    program, config, progress = run.program, run.config, run.reporter.progress
    devices = run.cluster.devices
    copies = 1 if program.groups is None else program.groups.num
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params)) // copies
    used = 1 if not config.mesh.sizes() else len(devices)
    progress.message(
        f"{num_params:,} parameters ({tree_bytes(state.params) / copies / 2**20:.1f} MiB) on {used} of {len(devices)} {devices[0].platform} "
        f"device{'s' * (len(devices) > 1)}, mesh {describe_mesh(program.sizes)}, {run.cluster.num_processes} process"
        f"{'es' * (run.cluster.num_processes > 1)}"
    )
    progress.message(f"run directory {run.directory}")
    alone = ["elastic.in_process has no effect: this is not started by spmdkit launch --elastic MIN:MAX"]
    for note in (*run.cluster.notes, *program.notes, *alone * (config.elastic.in_process and run.membership is None)):
        progress.message(f"note: {note}")
    progress.start()


def _conclude(run: Run) -> None:
    if run.cluster.is_main and run.config.log.progress != "off":
        print(visible(f"report {run.directory / 'report.html'}"), flush=True)


def _preempted(run: Run, stopped: Stop) -> Preempted:
    asked = None if run.signals is None else run.signals.requested
    name = stopped.why or ("a signal to another process" if asked is None else signal.Signals(asked).name)
    run.tell("preempted", signal=name, code=Preempted.exit_code)
    if run.checkpoints is None:
        return Preempted(
            f"stopped after step {run.step} by {name}. Nothing was saved: checkpoint is null in the config."
        )
    return Preempted(f"stopped after step {run.step} by {name}; saved. Start the same command again to go on.")


def join_as(config: Config) -> Cluster:
    """Returns the processes that the environment names, joined as a config asks for."""
    spec = detect_cluster(os.environ, config.cluster.environment)
    if spec.role == "evaluator":
        raise ConfigError(
            f"this process is an evaluator ({spec.found_by}), and does not train. `spmdkit train` starts one as what it is; from Python call "
            "spmdkit.run.evaluator.evaluate_each(config), or set cluster: {environment: none} to train alone."
        )
    limit_s = config.watchdog.longest_timeout_s if config.watchdog else None
    return join(spec, config.devices, collective_timeout_s=limit_s, interface=config.cluster.interface)


def watched(config: Config, cluster: Cluster) -> AbstractContextManager[Watchdog | None]:
    """Returns the context in which all processes are watched, as a config says."""
    board, folder = cluster.board("watch")
    return watching(config.watchdog, cluster.process_index, cluster.num_processes, board, folder)


def open_on_all_processes(
    config: Config, cluster: Cluster, task: Task | None = None, limit_bytes: int | None = None
) -> Program:
    """Returns the program of a config, the same on all processes; what `auto` tries is said on standard error, unless
    progress is off."""
    quiet = not cluster.is_main or config.log.progress == "off"
    say = lambda line: None if quiet else print(visible(line), file=sys.stderr, flush=True)
    made = lambda: task_of(config) if task is None else with_hooks(task, config)
    found = consistency.same_data(cluster, made, config.data.retries)
    opened = parameter_server.one_step(config)
    return consistency.same_program(cluster, lambda: open_program(opened, found, cluster.devices, limit_bytes, say))


def evaluate(
    config: Config, cluster: Cluster, task: Task | None = None, step: int | None = None, best: bool = False
) -> tuple[int, dict[str, Any]]:
    """Returns (step, metrics) of a checkpoint in the config's run directory: of `step`, the best, or the newest.

    A run that trains there at the same time does not delete it meanwhile.

    Raises:
        CheckpointError: there is none, it is damaged, or of another model.
    """
    with watched(config, cluster), kept(config.compile_cache, config.folder):
        with phase.during("import"):
            consistency.same_start(cluster, config)
            program = open_on_all_processes(config, cluster, task)
        directory = bucket.checkpoints_of(config)
        checkpoints = Checkpoints(directory, is_main=False, num_processes=cluster.num_processes, cluster=cluster)
        with restore.chosen_for_all(cluster, checkpoints, step, best) as chosen:
            if chosen is None:
                raise CheckpointError(
                    f"{directory} holds no checkpoint. Evaluation needs one. Train first: spmdkit train {config.source}."
                )
            left = unfinished(config.resolved_run_dir())
            if left is not None and not left.alive and cluster.is_main:
                print(visible(f"note: {left.told()}"), file=sys.stderr, flush=True)
            with phase.during("restore"):
                state, *_ = restored(checkpoints, chosen, program)
            checkpoints.close()
        with phase.during("evaluation"):
            return chosen, program.eval(state)
