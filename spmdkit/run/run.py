"""`Run`: the directory, the records and the progress of one run.

Only process 0 writes files other than checkpoints. All processes agree on decisions that depend on time or a signal, at
the same step. Only methods of `Run` change its attributes.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from spmdkit import data, metrics
from spmdkit.checkpoint import Checkpoints, Remote, best_step
from spmdkit.cluster import Cluster
from spmdkit.config import Config, to_yaml
from spmdkit.data import DeviceBatches
from spmdkit.errors import CheckpointError, CheckpointWriteError, Preempted, UserCodeError
from spmdkit.faults import ExitRequested, StopSignals, Watchdog, describe, taken_over
from spmdkit.foundation.constants import STEPS_IN_FLIGHT
from spmdkit.foundation.run_status import StepMark
from spmdkit.foundation.timeouts import OWNERSHIP_RECHECK_S, SAVE_ABANDON_S
from spmdkit.foundation.trees import whole_on_host
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics import read_lines
from spmdkit.metrics.report.run import write_report
from spmdkit.program.program import Program
from spmdkit.program.restore import checkpoints_of
from spmdkit.run import hooks, watchdog_callbacks
from spmdkit.run.driver import NO_DRIVER, Driver
from spmdkit.run.hook_runner import HookRunner
from spmdkit.run.hooks.base import DeviceMetrics, Metrics
from spmdkit.run.recovery import restore, resume_check, skipped_batches
from spmdkit.run.recovery.save_retries import Saves
from spmdkit.run.reporter import Reporter
from spmdkit.run.startup import bucket
from spmdkit.run.startup.run_directory import claim_directory, note_running
from spmdkit.step import rng
from spmdkit.step.state import TrainState

ROLES = {
    "initialises": "all",  # each process its shards, from the same seed; compared before the first step
    "restores": "all",  # each process its shards
    "saves": "all",  # each process its shards
    "commits": 0,  # the record, the commit by rename, and retention
    "decides": 0,  # decisions that depend on a clock or a file: checkpoint.every_seconds, stopping
    "summaries": 0,  # metrics.jsonl, counts.jsonl, trackers, the report
    "evaluates": "all",
}
"""Task -> `all`, or the process that performs it, in the events `started` and `restored`. There is no chief."""


class Run:
    """A context manager: locks the directory on entry, and has written all records on exit."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        program: Program,
        signals: StopSignals | None = None,
        watchdog: Watchdog | None = None,
        *,
        driver: Driver = NO_DRIVER,
        allow_change: Sequence[str] = (),
        reset: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config, self.cluster, self.program, self.clock = config, cluster, program, clock
        self.reset = tuple(reset)
        self._allow_change, self._described = tuple(allow_change), dict[str, Any]()
        self.directory = config.resolved_run_dir()
        self.step, self.first_step = 0, 1
        self.finished: str | None = None
        self.signals, self.watchdog, self.driver = signals, watchdog, driver
        self.batches: DeviceBatches | None = None  # the batches being read
        self.input_given_up = False
        self._stack = ExitStack()
        self.in_flight: collections.deque[DeviceMetrics] = collections.deque()
        self.last_logged: Metrics = {}
        self.last_eval: tuple[int, Metrics] | None = None
        self._rollbacks: set[Any] = set()
        self._extra_record: dict[str, Any] = {}
        self._numbers: tuple[int, Metrics] | None = None
        self._uneven_epochs = False
        self.reporter = Reporter(config, cluster, clock)
        self.hook_runner = HookRunner(
            hooks.of_run(config, program.task.hooks), cluster, config.num_steps, STEPS_IN_FLIGHT
        )

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            self._mark = StepMark(())
            directory = checkpoints_of(self.config)
            self.fence = claim_directory(self.cluster, self.directory, stack, shared=not isinstance(directory, Remote))
            is_owner = bucket.lease_bucket(self.config, self.cluster, self.fence, stack)
            options = self.config.checkpoint
            self.checkpoints: Checkpoints | None = None
            if options is not None:
                self.checkpoints = Checkpoints(
                    directory,
                    retention=options,
                    timeout_s=options.timeout_s,
                    is_main=self.cluster.is_main,
                    num_processes=self.cluster.num_processes,
                    cluster=self.cluster,
                    is_owner=is_owner,
                    **bucket.options(self.directory, self.cluster),
                )
            self.events = metrics.EventLog(
                self.directory / "events.jsonl", self.cluster.process_index, is_owner=self.fence.is_owner
            )
            self.saves = Saves(self, self.checkpoints, self.clock) if self.checkpoints is not None else None
            self._stack = stack.pop_all()
        newest = partial(watchdog_callbacks.newest_on_disk, self.checkpoints)
        if self.watchdog is not None:
            self.watchdog.record_end = partial(watchdog_callbacks.record_fault, self)
            self.watchdog.newest = newest
        if self.signals is not None:
            end_input = watchdog_callbacks.end_stalled_input
            self.signals.on_request = partial(end_input, self.cluster.num_processes, self.give_up_input, newest)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ExitRequested):
            self.events.write("preempted", step=self.step, code=error.exit_code, why=str(error))
        elif error is not None and (change := self.driver.event_fields(error)) is not None:
            self.events.write("membership_changed", step=self.step, **change)
            if self.checkpoints is not None:
                self.checkpoints.abandon(SAVE_ABANDON_S)  # a process died that was writing a part of the save
        elif error is not None and not isinstance(error, Preempted) and not taken_over.is_set():
            code = describe(error)[0]
            self.events.write("fault", step=self.step, code=code, error=f"{type(error).__name__}: {error}"[:500])
        # A failed process of several must not wait for a commit: its peers never reach it.
        waits = error is None or isinstance(error, Preempted) or self.cluster.num_processes == 1
        if self.batches is not None:
            self.batches.close()
        try:
            if waits and self.saves is not None:
                self.saves.close()
        except CheckpointWriteError as failed:
            self.events.write("fault", step=self.step, code=failed.exit_code, error=str(failed)[:500])
            if error is None:
                raise
        finally:
            self._mark.close()
            self._stack.close()
            self.events.close()

    @property
    def last_evaluation(self) -> Metrics | None:
        """The metrics of the last evaluation in this process, or None."""
        return self.last_eval[1] if self.last_eval else None

    @property
    def saved_step(self) -> int:
        """The step of the newest state that is committed or being written; 0: none."""
        return 0 if self.checkpoints is None else self.checkpoints.saved_step

    def has_saved(self, step: int) -> bool:
        """Returns whether the state of `step` is committed or being written, the same on every process."""
        if step or self.checkpoints is None:
            return self.saved_step == step
        steps = self.checkpoints.steps
        return self.checkpoints.unfinished_step == 0 or self.cluster.from_main("saved step", lambda: 0 in steps())

    @property
    def is_complete(self) -> bool:
        """Whether the restored state is that of the last step, or of a run that a hook ended."""
        return self.step >= self.config.num_steps or self.finished is not None

    def read_batches(self) -> DeviceBatches:
        """Starts reading the batches after `step`, and returns them."""
        self.batches = self.program.stream(self.step + 1)
        return self.batches

    def restore_or_init(self) -> TrainState:
        """Returns the newest intact state, or the initial state, and opens the records at that step.

        Raises:
            ConfigError: the directory contains a run with different examples.
            CheckpointError: all checkpoints are damaged or missing, or the newest is of a different model.
        """
        if self.checkpoints is not None or self.config.elastic.in_process:  # snapshots have a record too
            self._described = resume_check.described(self.config, self.program)  # later a thread reads the data
        if self.checkpoints is not None:
            bucket.download_skipped(self.config, self.cluster, self.directory)
        restored = self.driver.restore_from_memory(self.cluster, self.program, self.checkpoints)
        if restored is None:
            restored = restore.initial_state(
                self.cluster,
                self.checkpoints,
                self.program,
                reset=self.reset,
                run_dir=self.directory,
                may_lose=resume_check.CHECKPOINTS in self._allow_change,
            )
        step, changed, lines = restored.step, list[resume_check.Change](), list[str]()
        if restored.record is not None:
            self.resume_from(step, restored.record, restored.is_saved)
            now = {"config": self._config_text, "described": self._described}
            changed = resume_check.check(
                restored.record, now, step, self.program.schedule, self.directory, self._allow_change
            )
            self.first_step = step + 1
            lines = bucket.download_records(self.config, self.directory) if self.cluster.is_main else []
        else:
            lines = restore.rename_old_records(self.directory) if self.cluster.is_main else []
            self.program.skip_batches(skipped_batches.read_for_all(self.directory, self.cluster))
        self.hooks_at_start = self.hook_runner.state()
        self.reporter.open(self, step, self._stack)
        restore.quarantine_checkpoints(self, self.checkpoints, restored, [*lines, *restored.lines])
        where = {"roles": ROLES, "mesh": describe_mesh(self.program.sizes), "form": self.program.form}
        if restored.record is None:
            self.events.write("started", step=step, **where)
        else:
            self.events.write("restored", step=step, **where)
        if changed and self.cluster.is_main:
            self.message(f"since step {step} was saved, these have changed:\n{resume_check.table(changed)}")
            self.events.write("settings_changed", step=step, changes=[change._asdict() for change in changed])
        self._mark = note_running(self, step)
        if restored.record is not None:
            restore.note_randomness(self, restored.record, step)
            ended = restored.record.get("finished")
            if ended is not None and ended["steps"] == self.config.num_steps:
                self.finished = ended["why"]
        return restored.state

    def resume_from(self, step: int, record: Mapping[str, Any], is_saved: bool) -> None:
        """Sets the run to the step of a checkpoint, and restores the schedule and the hooks."""
        on_disk = skipped_batches.read_for_all(self.directory, self.cluster)
        skipped_batches.take(self.program, on_disk, step, record)
        done = skipped_batches.as_saved(self.program.schedule, record).number(step)
        self.program.continue_sizes(tuple((start, size) for start, size in record["batch_sizes"]), done)
        self.program.skipped_rows[0].restore(record.get("skipped_rows", []))
        self.program.feed.restore(step, record.get("position"), "train_data" not in self._allow_change)
        for name in self.hook_runner.restore(self._hook_states(record)):
            self.events.write("hook_removed", step=step, hook=name)
        self.step = step
        if self.checkpoints is not None:
            self.checkpoints.saved_step = step if is_saved else 0

    def _hook_states(self, record: Mapping[str, Any]) -> dict[str, Any]:
        may_change = "train_data" in self._allow_change
        return {name: x for name, x in record.get("hooks", {}).items() if not (may_change and name == "data_check")}

    def return_to(self, found: restore.Restored) -> None:
        """Resets the run to an earlier checkpoint or to step 0, and drops the results of undone steps."""
        self.hook_runner.clear_requests()
        self.driver.on_rollback()
        self.in_flight.clear()
        self._numbers, self.last_eval, self.last_logged = None, None, {}
        if found.record is not None:
            self.resume_from(found.step, found.record, found.is_saved)
            return
        self.hook_runner.restore(self.hooks_at_start)
        self.program.continue_sizes(self.config.batch_sizes, 0)
        self.program.feed.restore(0, None)
        self.step = 0
        if self.checkpoints is not None:
            self.checkpoints.saved_step = 0

    def gather(self, tree: Any) -> Any:
        """Returns the tree with whole numpy arrays, on every process; typed keys as their data. All processes call it:
        each leaf is replicated on the devices, one after the other.

        Raises:
            UserCodeError: only process 0 calls it, in a hook with `on="main"`.
        """
        if (name := self.hook_runner.on_main_only) is not None:
            raise UserCodeError(
                f"hook '{name}': run.gather is called on process 0 only. All processes hold parts of the arrays, and "
                'gather them together. Write sk.Hook(..., on="all").'
            )
        return jax.tree.map(whole_on_host, tree)

    def is_log_step(self, step: int) -> bool:
        """Returns whether the metrics of `step` are written: the first, every `log.every_steps`, the last."""
        return step == 1 or step % self.config.log.every_steps == 0 or step == self.config.num_steps

    def numbers(self, step: int, values: DeviceMetrics) -> Metrics:
        """Returns the metrics of `step` on the host: floats and arrays. Waits for the device, once per step."""
        if self._numbers is None or self._numbers[0] != step:
            values_on_host = jax.device_get(self.program.metrics(values))
            self._numbers = (step, {name: x if x.ndim else float(x) for name, x in values_on_host.items()})
            self.in_flight.clear()
        return self._numbers[1]

    def message(self, text: str) -> None:
        """Shows a line on the terminal of process 0."""
        self.reporter.message(text)

    def write(self, record: Mapping[str, object], kind: str = "scalars") -> None:
        """Writes a record `{"step", ...}` of host values to the trackers on process 0; scalars are also shown.

        Arrays among scalars (`sk.bincount`) form a separate record of the kind `array`; all kinds are in
        metrics/trackers/base.py.
        """
        if self.cluster.is_main:
            self.fence.check(every_s=OWNERSHIP_RECHECK_S)
            self.reporter.write(record, kind)

    def best_checkpoint(self) -> Path | None:
        """Returns the local folder of the best checkpoint by `checkpoint.best`; None if there is none."""
        if self.checkpoints is None or isinstance(self.checkpoints.directory, Remote):
            return None
        with contextlib.suppress(CheckpointError):
            return Path(self.checkpoints.directory) / str(best_step(self.checkpoints.directory))
        return None

    def newest(self) -> str:
        """Returns a sentence about the newest checkpoint, once the save in flight has ended."""
        if self.checkpoints is None:
            return "Checkpoints are disabled."
        self.checkpoints.wait_without_raising()
        latest = self.checkpoints.latest()
        return f"The newest checkpoint is of step {latest}." if latest else "No checkpoint was saved yet."

    def newest_committed(self) -> str:
        """Returns `newest` once all processes have committed the save in flight. All processes call it at one step."""
        if self.saves is not None:
            self.saves.finish_save()
        return self.newest()

    def report_saves(self) -> None:
        """Reports a slow save. Raises CheckpointWriteError after too many failures."""
        if self.saves is not None:
            self.saves.note()

    @functools.cached_property
    def _config_text(self) -> str:
        """The settings as a record contains them. Cached, since each save needs them (10 ms)."""
        return to_yaml(self.config, hide_secrets=True)

    def record(self, step: int) -> dict[str, Any]:
        """Returns the record of a checkpoint: everything except arrays. Raises ConfigError if another run owns the
        directory now."""
        self.fence.check()
        ended = {} if self.finished is None else {"finished": {"why": self.finished, "steps": self.config.num_steps}}
        return {
            "config": self._config_text,
            "described": self._described,
            "next_batch": self.program.schedule.digest(step + 1),
            "batch_sizes": [list(pair) for pair in self.program.schedule.sizes or self.config.batch_sizes],
            **self._data_position(step),
            "versions": self.reporter.environment["versions"],
            "eval_params": self.program.has_eval_params,
            "groups": None if self.program.groups is None else self.program.groups.num,
            "state_reduction": self.program.separate_state_reduction,
            "mesh": {axis: size for axis, size in self.program.sizes.items() if size > 1},
            "randomness": rng.identity(),
            "hooks": self.hook_runner.state(),
            "reset": list(self.reset),
            "skipped_batches": [list(pair) for pair in self.program.schedule.skipped],
            "skipped_rows": skipped_batches.skipped_rows_record(self.config, self.cluster, self.program),
            **self._extra_record,
            **ended,
        }

    def _data_position(self, step: int) -> dict[str, Any]:
        """Returns the position of a stream after `step`, merged over all processes, for `record`."""
        position = self.program.feed.position(step)
        if position is None:
            return {}
        if self.cluster.num_processes > 1:
            position = data.merge_positions(self.cluster.gather("position", position))
        epochs = [at["epoch"] for at in position["shards"].values()]
        if epochs and max(epochs) - min(epochs) > 1 and not self._uneven_epochs:
            self._uneven_epochs = True
            self.message(
                f"WARNING: the shards of train_data have unequal lengths: one is in epoch {max(epochs)} and another in "
                f"epoch {min(epochs)}, so the examples of short shards are used more often. Use files of equal length, "
                "or fewer data.shards."
            )
        return {"position": position}

    def mark_finished(self, why: str) -> None:
        """Records that a hook ended the run before its last step, for the next checkpoint."""
        self.finished = why

    def record_evaluation(self, step: int, values: Metrics) -> None:
        """Stores the metrics of an evaluation and writes them."""
        self.last_eval = (step, values)
        self.write({"step": step, "split": "eval", **values})

    def is_evaluated(self, step: int) -> bool:
        """Returns whether metrics.jsonl has an evaluation of `step` that `on_nonfinite` permits; the same on all
        processes, which all call it."""

        def recorded() -> bool:
            lines = read_lines(self.directory / "metrics.jsonl")
            found = [line for line in lines if line.get("split") == "eval" and line.get("step") == step]
            permits_all = self.config.on_nonfinite.evaluation == "continue"
            numbers = [x for line in found[-1:] for x in line.values() if isinstance(x, float)]
            return bool(found) and (permits_all or all(map(math.isfinite, numbers)))

        return bool(self.cluster.from_main("evaluated", recorded))

    def forget_evaluation(self) -> None:
        """Drops the last evaluation: it is of another state than the one with which training continues."""
        self.last_eval = None

    def record_metrics(self, step: int, numbers: Metrics, more: Mapping[str, float]) -> None:
        """Stores and writes the metrics of a log step, and `more`, where a metric of the task does not replace it."""
        epoch = self.program.feed.epoch(step)
        counted = {} if epoch is None else {"epoch": epoch}
        self.write({"step": step, **more, **counted, **numbers})
        self.last_logged = {"step": step, **numbers}

    def record_snapshot(self, step: int, extra_record: dict[str, Any]) -> None:
        """Sets the run to `step` of a server's snapshot; the next checkpoint's record includes `extra_record`."""
        self.step, self._extra_record = step, extra_record

    def is_new_rollback(self, from_step: int, skipped: Any) -> bool:
        """Returns whether this is the first rollback from `from_step` with these skipped batches."""
        rollback = (from_step, self.step, skipped)
        is_new = rollback not in self._rollbacks
        self._rollbacks.add(rollback)
        return is_new

    def give_up_input(self) -> None:
        """Ends the loop while the data source is blocked. Callable from any thread."""
        self.input_given_up = True
        if self.batches is not None:
            self.batches.interrupt()

    def dispatched(self, step: int, values: DeviceMetrics, wait_s: float, tokens: int = 0) -> None:
        """Records a dispatched step. Waits for the device only if too many steps are in flight."""
        self.step = step
        self._mark.at(step)
        schedule = self.program.schedule
        examples = schedule.size(schedule.number(step)) if schedule.sizes else None
        self.reporter.throughput.tick(step, wait_s, examples, tokens)
        self.in_flight.append(values)
        if len(self.in_flight) > STEPS_IN_FLIGHT:
            jax.block_until_ready(self.in_flight.popleft())

    def finish(self, save_again: Callable[[], None]) -> None:
        """Waits until the last save is committed. Raises CheckpointWriteError after too many failures."""
        if self.saves is not None:
            self.saves.finish(save_again)
            # The launcher ends process 0 if another process exits before process 0 has committed.
            self.cluster.barrier("committed")

    def leave_cluster(self) -> None:
        """Leaves the cluster with all processes, after success only: JAX aborts the others if one leaves early."""
        if self.watchdog is not None:
            self.watchdog.stop()
        self.cluster.shutdown()

    def close_records(self, event: str, **fields: Any) -> None:
        """Writes the last event, and the report."""
        self.fence.check()
        self.events.write(event, step=self.step, **fields)
        self.reporter.close()
        if self.cluster.is_main:
            write_report(self.directory)
