"""`start_run`: the run of an existing script, which keeps its training loop and its step.

    run = sk.start_run(train_step, state, steps=1000, run_dir="runs/first")
    state = run.state
    for batch in run.batches(loader):
        state, metrics = run.step(state, batch)
    run.close()

A run has checkpoints, metrics, a watchdog, stop signals, preemption sources, hooks and a plan, and its processes agree
on the step at which they save or stop. Rollbacks, evaluation and the layout belong to the script.
"""

from __future__ import annotations

import atexit
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.config import Config
from spmdkit.data import DeviceBatches
from spmdkit.errors import ConfigError, SpmdkitError, UserCodeError
from spmdkit.faults import ExitRequested, StopSignals, exit_handler, report_and_exit
from spmdkit.faults.error_mapping import callbacks_that_raise
from spmdkit.foundation import phase
from spmdkit.foundation.formatting import nearest, visible
from spmdkit.foundation.trees import is_key
from spmdkit.plan.fit_check import start_plan_thread
from spmdkit.program import opening
from spmdkit.program.compile_cache import enable_cache
from spmdkit.program.script_program import ScriptProgram
from spmdkit.program.task import Task, load_hooks
from spmdkit.run.actions import perform, save
from spmdkit.run.hook_runner import NOTHING
from spmdkit.run.hooks.base import Decision, Hook, Rollback, Stop
from spmdkit.run.loop import finish, log_run_start, watchdog_context
from spmdkit.run.recovery.emergency_save import save_before_exit
from spmdkit.run.run import Run
from spmdkit.run.startup import consistency
from spmdkit.run.trainer import STOP_AND_SAVE
from spmdkit.run.watchdog_callbacks import exit_on_stuck_callback
from spmdkit.step import finite_check
from spmdkit.step.state import TrainState
from spmdkit.step.step import StepChecks

SETTINGS = (
    "batch_size", "checkpoint", "cluster", "compile_cache", "hooks", "log", "on_nonfinite", "preemption", "profile",
    "run_dir", "watchdog",
)  # fmt: skip
"""The keys of a config that apply to a script. The script decides all others."""

_open: list[ScriptRun] = []
_failure: list[BaseException] = []  # the error that ended the last run


@ignores_user_settings
def start_run(train_step: Callable[..., Any], state: Any, *, steps: int, **settings: Any) -> ScriptRun:
    """Starts the run of a script, from the newest checkpoint in its run directory or from `state`.

    Args:
        train_step: the script's step, called as it is. Its results contain the new state; all other scalars, and
            mappings of scalars, are metrics.
        state: what the step receives and returns: one pytree, or a tuple of several, such as (params, opt_state). Its
            shardings are kept, also when it is restored.
        steps: the last step.
        settings: keys of a config: run_dir, checkpoint, log, watchdog, preemption, on_nonfinite, hooks (config entries
            or `sk.Hook`), cluster, profile, compile_cache, batch_size (examples per step, for `examples_per_s`).

    Raises:
        ConfigError, CheckpointError: raised before anything in the directory changes. Uncaught, they end the process
            with their exit code.
    """
    _install_excepthook()
    if _open:
        raise ConfigError("sk.start_run: another run of this process is open. Call close() of that run first.")
    hooks = [hook for hook in settings.get("hooks", ()) if isinstance(hook, Hook)]
    if hooks:
        settings["hooks"] = [hook for hook in settings["hooks"] if not isinstance(hook, Hook)]
    return ScriptRun(_config(train_step, steps, settings), train_step, state, hooks)


def join_processes(devices: str | Sequence[int] = "auto", environment: str = "auto") -> None:
    """Joins the processes of the environment (`spmdkit launch`, srun, mpirun, a pod): they are one job. Does nothing in
    a single process. Call it before JAX creates devices, instead of `jax.distributed.initialize`.

    Args:
        devices, environment: the keys `devices` and `cluster.environment` of a config.
    """
    _install_excepthook()
    task = "spmdkit.run.script:join_processes"
    settings: dict[str, Any] = {"devices": devices, "cluster": {"environment": environment}}
    opening.join_processes(Config(task=task, **settings))


class ScriptRun:
    """The open run of a script. Also a context manager that closes it.

    Attributes:
        state: the state after the last step, in the form that was passed to `start_run`; after a restart the restored
            one.
        start_step: the number of steps that earlier starts completed.
        is_done: whether the last step is done, or a hook has ended the run.
    """

    def __init__(self, config: Config, train_step: Callable[..., Any], state: Any, hooks: Sequence[Hook]):
        self._train_step, self._is_closed, self._wait_s = train_step, False, 0.0
        self._stop: Stop | None = None
        self._shown: tuple[int, list[Any], TrainState] | None = None
        self._wait_for_plan: Callable[[], object] = lambda: None
        with ExitStack() as stack:
            signals = stack.enter_context(StopSignals())
            with signals.raise_on_signal(report_and_exit):
                cluster = opening.join_processes(config)
                signals.reinstall()
                signals.announce = cluster.is_main
                watchdog = stack.enter_context(watchdog_context(config, cluster))
                self._cache = stack.enter_context(enable_cache(config.compile_cache, config.folder))
                with phase.during("import"):
                    consistency.same_start(cluster, config)
                    task = Task(
                        init=lambda key: state,
                        train_step=lambda state, batch: (state, batch),
                        hooks=_without_optimizers([*hooks, *load_hooks(config.hooks, config.folder)]),
                        unit="batches" if config.batch_size == 1 else "examples",
                    )
                    self._program = ScriptProgram(config, task, train_step, state)
                self._run = run = stack.enter_context(Run(config, cluster, self._program, signals, watchdog))
                with phase.during("restore"):
                    current = run.restore_or_init()
                    consistency.same_state(cluster, run.step, current)
            self.start_step = run.step
            own = self._program.own
            self._parts = own.parts if run.first_step == 1 else own.parts_of(current)
            log_run_start(run, current)
            run.reporter.throughput.start()
            run.hook_runner.call("begin", run, run.step, current)
            self._perform(run.hook_runner.decision_at_start())
            stack.enter_context(callbacks_that_raise(partial(exit_on_stuck_callback, run)))
            self._stack = stack.pop_all()
        self._to_drop = self.start_step
        _open.append(self)
        phase.enter(SCRIPT)

    @property
    def state(self) -> Any:
        return self._program.own.as_given(self._parts)

    @property
    def is_done(self) -> bool:
        return self._stop is not None or self._run.is_complete

    @property
    def is_replaying(self) -> bool:
        """Whether `batches` has yet to drop batches of earlier starts."""
        return self._to_drop > 0

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yields the items of a source that follow the restored step, until the run is done.

        Items of completed steps are read and dropped, over all calls (an epoch each), so that generators and random
        numbers of the script continue as in an uninterrupted run. A source that starts at `start_step` itself needs no
        call of this method.
        """
        items = iter(source)
        while self._to_drop or not self.is_done:
            begun = time.perf_counter()
            phase.enter("data", self._run.step + 1)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                phase.enter(SCRIPT)
            if self._to_drop:
                self._to_drop -= 1
                continue
            self._wait_s = time.perf_counter() - begun
            yield item

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the script's step, records the results, and performs the actions that are due. Returns what the step
        returned.

        Raises:
            Preempted: a signal or a preemption source requested a stop; the state is saved.
            NonFiniteError, CheckpointWriteError, ConfigError: see `spmdkit.errors`.
        """
        if self._is_closed or self.is_done:
            why = "is closed" if self._is_closed else f"ended at step {self._run.step} of {self._run.config.num_steps}"
            raise ConfigError(f"run.step: this run {why}. Use run.batches(...), or end the loop when run.is_done.")
        self._to_drop = 0
        try:
            return self._take_step(args, kwargs)
        except SpmdkitError as error:
            self._end(error)
            raise
        finally:
            phase.enter(SCRIPT)

    def _take_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        run, program = self._run, self._program
        step = run.step + 1
        if run.input_given_up:
            self._perform(STOP_AND_SAVE)
        run.hook_runner.call("before_step", run, step, self._fields(run.step))
        self._perform(run.hook_runner.more())
        if self._stop is not None:
            raise ConfigError(f"a hook ended the run before step {step}. End the loop when run.is_done.")
        is_first = step == run.first_step
        self._shown = None  # the step may donate the state
        if is_first:
            with phase.during("compile"):
                self._trace(args, kwargs)
                results = self._train_step(*args, **kwargs)
        else:
            results = self._train_step(*args, **kwargs)
        positions, returned = program.own.find(results)
        self._parts = [returned[i] for i in positions]
        metrics = _metrics([x for i, x in enumerate(returned) if i not in positions])
        run.dispatched(step, metrics, self._wait_s)
        self._wait_s = 0.0
        program.checks = StepChecks(self._code(step, metrics), None)
        before = self._parts
        run.hook_runner.after_step(run, step, self._fields(step), metrics)
        self._perform(run.hook_runner.decision(step))
        if is_first:
            self._start_plan()
        if self._parts is before:
            return results
        for i, part in zip(positions, self._parts, strict=True):  # a hook replaced the state
            returned[i] = part
        return type(results)(returned) if type(results) in (tuple, list) else returned[0]

    @ignores_user_settings
    def _code(self, step: int, metrics: Mapping[str, jax.Array]) -> jax.Array | None:
        """Returns the code of non-finite metrics at a log step (step/finite_check.py)."""
        if not self._run.is_log_step(step):
            return None
        policies, bits = self._run.config.policies(), 0
        for name, x in self._run.numbers(step, metrics).items():
            kind = "loss" if name == "loss" else "metrics"
            if policies[kind] == "stop" and not np.isfinite(x).all():
                bits |= finite_check.KINDS[kind]
        return jnp.asarray(np.int32(bits))

    @ignores_user_settings
    def _perform(self, decision: Decision) -> None:
        """Performs the actions of hooks. Raises Preempted if the run stops before its last step and is saved."""
        if decision is NOTHING:
            return
        run = self._run
        if isinstance(decision.turn, Rollback):
            raise ConfigError(
                "sk.Rollback in a run of sk.start_run: the loop and its data belong to the script. Return sk.Stop, and "
                "start the script again, which continues from the newest checkpoint."
            )
        current = self._fields(run.step)
        new, _, stop = perform(run, run.step, current, cast(DeviceBatches, None), decision)
        if new is not current:
            self._parts = self._program.own.parts_of(new)
        if stop is not None:
            self._stop = stop
            run.hook_runner.call("end", run, run.step, new)
            if stop.code:
                finish(run, new, stop, self._cache)

    @ignores_user_settings
    def _fields(self, step: int) -> TrainState:
        """Returns the state of `step` for hooks and checkpoints; the same object until the next step."""
        if self._shown is None or self._shown[0] != step or self._shown[1] is not self._parts:
            self._shown = step, self._parts, self._program.fields(self._parts, step)
        return self._shown[2]

    # ---- the plan

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            self._program.trace(self._parts, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the call of the step raises it again, if it is the step's
            self._program.notes.append(f"no plan: {type(error).__name__}: {error}".splitlines()[0][:200])
        for note in self._program.notes:
            self._run.message(f"note: {note}")

    @ignores_user_settings
    def _start_plan(self) -> None:
        run = self._run
        if not self._program.can_plan:
            return
        if run.cluster.num_processes > 1:  # compilers of several processes may wait for each other
            _ = self._program.compiled
        self._wait_for_plan = start_plan_thread(
            self._program, run.cluster, run.directory, run.message, run.events.write
        )

    # ---- the end

    @ignores_user_settings
    def close(self) -> None:
        """Saves the last state, and writes the records and the report. Does nothing if the run has ended.

        Raises:
            NonFiniteError, CheckpointWriteError: the state is not finite, or could not be saved.
        """
        if self._is_closed:
            return
        try:
            self._finish()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def _finish(self) -> None:
        run = self._run
        trained = run.step >= run.first_step
        if not trained:
            run.leave_cluster()
            run.events.write("stopped", step=run.step, code=0, why="no step was trained")
            run.message(f"no step was trained: step {run.step} of {run.config.num_steps} is saved in {run.directory}")
            return
        current = self._fields(run.step)
        save(run, run.step, current)
        if self._stop is None:
            run.hook_runner.call("end", run, run.step, current)
        self._wait_for_plan()
        finish(run, current, self._stop, self._cache)

    @ignores_user_settings
    def _end(self, error: BaseException | None) -> None:
        """Closes the records of the run, and restores the signal handlers."""
        if self._is_closed:
            return
        self._is_closed = True
        if self in _open:
            _open.remove(self)
        if error is not None:
            _failure[:] = [error]
            save_before_exit(self._run, self._fields(self._run.step), error)
        self._stack.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))

    def __enter__(self) -> ScriptRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(error)


SCRIPT = "in the script"
"""The phase between two steps, with the limit of a hook."""


def _config(train_step: Callable[..., Any], steps: int, settings: Mapping[str, Any]) -> Config:
    """Returns the config of a script. Raises ConfigError for keys and policies that do not apply to it."""
    for key in settings:
        if key not in SETTINGS:
            raise ConfigError(
                f"sk.start_run: {key} has no effect, since the script has its own step, data and layout. The settings "
                f"are {', '.join(SETTINGS)}.{nearest(key, SETTINGS)} Remove it."
            )
    file = _source_file(train_step)
    name = getattr(inspect.unwrap(train_step), "__name__", "")
    task = f"{file}:{name if name.isidentifier() else 'train_step'}" if file else "spmdkit.run.script:start_run"
    defaults = {"batch_size": 1} | ({"run_dir": f"runs/{Path(file).stem}"} if file else {})
    config = Config(**{**defaults, **settings, "task": task, "steps": steps})
    wrong = [name for name, policy in config.on_nonfinite if name != "evaluation" and policy in ("skip", "rollback")]
    if wrong or config.on_nonfinite.save_batch:
        raise ConfigError(
            f"sk.start_run: on_nonfinite.{(*wrong, 'save_batch')[0]} needs a step and data of spmdkit, and the script "
            "has its own. Valid: stop, continue."
        )
    return config


def _without_optimizers(hooks: Sequence[Any]) -> Sequence[Any]:
    """Returns the hooks. Raises ConfigError if one of them wraps the optimizer, which the script has."""
    for hook in hooks:
        if hook.optimizer is not None:
            raise ConfigError(
                f"sk.start_run: the hook {hook.name} has no effect, since it wraps the optimizer, and the script has "
                "its own. Remove it, or change the learning rate in the script."
            )
    return hooks


def _source_file(train_step: Callable[..., Any]) -> str | None:
    """Returns the file of the step, or else of the script."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(train_step))
    except TypeError:
        file = None
    file = file or getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve()) if file and file.endswith(".py") else None


def _metrics(results: Sequence[Any]) -> dict[str, jax.Array]:
    """Returns the scalars of the results of a step without its state, by name. The first scalar without a name is
    `loss`."""
    metrics: dict[str, jax.Array] = {}
    for path, x in ((path, x) for result in results for path, x in _named_scalars(result)):
        name = path or ("loss" if "loss" not in metrics else f"result_{len(metrics)}")
        metrics.setdefault(name, x)
    return metrics


def _named_scalars(result: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(result, Mapping):
        for name, x in result.items():
            yield from _named_scalars(x, f"{prefix}/{name}" if prefix else str(name))
    elif type(result) in (tuple, list):
        for x in result:
            yield from _named_scalars(x, prefix)
    elif isinstance(result, jax.Array) and not result.shape and not is_key(result):
        yield prefix, result


def _close_at_exit() -> None:
    """Closes the records of a run that the script did not close. At this point Python starts no thread, so that the
    state cannot be saved."""
    for run in list(_open):
        print(visible("note: the script ended without run.close(): its last state is not saved"), file=sys.stderr)
        run._end(None)


atexit.register(_close_at_exit)


def _install_excepthook() -> None:
    """Uncaught errors end the script as they end `spmdkit train`: the run is closed, a message, an exit code."""
    if getattr(sys.excepthook, "of_spmdkit", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        is_ours = bool(_open) or error in _failure
        for run in list(_open):
            run._end(error)
        if not is_ours and not isinstance(error, SpmdkitError | ExitRequested):
            previous(kind, error, traceback)
            return
        is_users = not isinstance(error, SpmdkitError | ExitRequested | KeyboardInterrupt)
        if is_users and not exit_handler.lost_peer(error):
            failure = UserCodeError(f"{type(error).__name__} was raised in the script.")
            failure.__cause__ = error
            error = failure
        code = exit_handler.report(error)
        if jax.process_count() > 1:
            exit_handler.exit_process(code)
        raise SystemExit(code)

    hook.of_spmdkit = True  # type: ignore[attr-defined]
    sys.excepthook = hook
