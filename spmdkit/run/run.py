"""A run: its directory, its record on disk, its face, and what is due at which step. The loop itself is in loop.py.

    run_dir/  config.yaml  environment.json  metrics.jsonl  events.jsonl  checkpoints/<step>/  report.html  tensorboard/  profile/

Only process 0 writes files other than checkpoints. What depends on time or on a signal is decided once and known to all
processes, at the same step.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from spmdkit import files, keys, metrics
from spmdkit.checkpoint import Checkpoints, RunLock
from spmdkit.cluster import Cluster
from spmdkit.config import Config, to_yaml
from spmdkit.errors import CheckpointWriteError, ConfigError, NonFiniteError, Preempted
from spmdkit.faults import StopSignals
from spmdkit.mesh import describe_mesh
from spmdkit.program import Program
from spmdkit.state import TrainState

STEPS_IN_FLIGHT = 16
MATHEMATICS = ("task", "seed", "batch_size", "data.shuffle", "data.remainder")
"""Settings that a run keeps for life: with another one, the examples of a step would be others."""


class Run:
    """What happens around the steps. A context manager: entered with the directory locked, left with all of it written."""

    def __init__(
        self, config: Config, cluster: Cluster, program: Program, *, clock: Callable[[], float] = time.monotonic
    ):
        self.config, self.cluster, self.program, self._clock = config, cluster, program, clock
        self.directory = config.resolved_run_dir()
        self.step = 0
        self._first_step = 1
        self._stack = ExitStack()
        self._flying: collections.deque[tuple[int, Any]] = collections.deque()
        cpu = cluster.devices[0].platform == "cpu"
        several = cluster.num_processes > 1 and len(cluster.devices) > cluster.num_processes
        # Several CPU devices in each of several processes deadlock in Gloo when many steps are dispatched without waiting
        # (jaxlib 0.10.2). In one process `join` has made the thread pool large enough; there, waiting after each step
        # cost 7 % at 10 ms a step (two devices on two cores, 2026-11-20).
        self._most_in_flight = 1 if cpu and several else STEPS_IN_FLIGHT
        self._last_logged: dict[str, float] = {}
        self._last_eval: tuple[int, dict[str, float]] | None = None
        self._saved_at_step, self._saved_at_time = 0, clock()
        self._trace_until: int | None = None
        self._environment = metrics.environment(
            folder=config.folder, devices=cluster.devices, num_processes=cluster.num_processes
        )

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            if self.cluster.is_main:
                stack.enter_context(RunLock(self.directory))
            self.cluster.barrier("run directory")
            options = self.config.checkpoint
            self.checkpoints: Checkpoints | None = None
            if options is not None:
                self.checkpoints = Checkpoints(
                    self.directory / "checkpoints",
                    keep=options.keep,
                    best=(options.best.metric, options.best.mode) if options.best else None,
                    timeout_s=options.timeout_s,
                    is_main=self.cluster.is_main,
                    num_processes=self.cluster.num_processes,
                    cluster=self.cluster,
                )
            self.events = metrics.EventLog(self.directory / "events.jsonl", self.cluster.process_index)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None and not issubclass(kind, Preempted):
            code = getattr(error, "exit_code", 70)
            self.events.write("fault", step=self.step, code=code, error=f"{kind.__name__}: {error}"[:500])
        # A failed process of several must not wait for a commit that its peers, who wait for it, will never join.
        waits = self.checkpoints is not None and (
            kind is None or issubclass(kind, Preempted) or self.cluster.num_processes == 1
        )
        try:
            if waits and self.checkpoints is not None:
                self._note_commits(self.checkpoints.close())
        except CheckpointWriteError as failed:
            self.events.write("fault", step=self.step, code=failed.exit_code, error=str(failed)[:500])
            if kind is None:
                raise
        finally:
            self._stack.close()
            self.events.close()

    @property
    def last_evaluation(self) -> dict[str, float] | None:
        """The metrics of the last evaluation in this process, or None."""
        return self._last_eval[1] if self._last_eval else None

    # ---- begin -------------------------------------------------------------------------------------------------------

    def restore_or_init(self) -> TrainState:
        """Returns the newest saved state, or a new one, and opens the records at that step.

        Raises:
            ConfigError: the directory holds a run that would see other examples.
            CheckpointError: the newest checkpoint is damaged or of another model.
        """
        latest = self._latest_for_all()
        if latest is None:
            self._open_records(0)
            self.events.write("started", step=0, mesh=describe_mesh(self.program.sizes), form=self.program.form)
            return self.program.init()
        assert self.checkpoints is not None
        state, record = self.checkpoints.restore(latest, self.program.abstract_state)
        self._check_same_run(record, latest)
        self.step = self._saved_at_step = latest
        self._first_step = latest + 1
        self._open_records(latest)
        self.events.write("restored", step=latest, mesh=describe_mesh(self.program.sizes), form=self.program.form)
        self._note_randomness(record, latest)
        return state

    def _note_randomness(self, record: dict[str, Any], step: int) -> None:
        """Says so where the keys of the coming steps are not those that the run would have had before."""
        before, now = record.get("randomness", {"version": 1}), keys.identity()
        if before != now:
            self.events.write("randomness changed", step=step, before=before, now=now)
            self.face.message(
                f"note: step {step} was saved under other random keys ({_described(before)}; now {_described(now)}): randomness "
                "continues differently from here, dropout and noise are not what they would have been"
            )

    def _latest_for_all(self) -> int | None:
        return None if self.checkpoints is None else latest_for_all(self.cluster, self.checkpoints)

    def _check_same_run(self, record: dict[str, Any], step: int) -> None:
        before = record.get("settings", {})
        for name, value in self._settings().items():
            if name in before and before[name] != value:
                old, new = (str(x).lower() if isinstance(x, bool) else x for x in (before[name], value))
                raise ConfigError(
                    f"{self.directory} holds a run with {name}: {old}, saved at step {step}; now {name} is {new}. A run keeps "
                    f"{', '.join(MATHEMATICS)}, or its examples would be others. Set {name} back, or give the new run a run_dir of its own."
                )
        digest = record.get("next_batch")
        if digest is not None and digest != self.program.schedule.digest(step + 1):
            raise ConfigError(
                f"train_data is not what it was: batch {step + 1} has other examples than when step {step} was saved "
                f"({self.program.schedule.num_examples} examples now). Bring the data back, or give the new run a run_dir of its own."
            )

    def _settings(self) -> dict[str, Any]:
        config = self.config
        values = {
            "task": config.task,
            "seed": config.seed,
            "batch_size": config.batch_size,
            "data.shuffle": config.data.shuffle,
            "data.remainder": config.data.remainder,
        }
        values["task"] = ":".join(Path(part).name for part in config.task.rsplit(":", 1))
        return values

    def _open_records(self, step: int) -> None:
        config = self.config
        self.sinks: list[Any] = []
        mode = config.log.progress if self.cluster.is_main else "off"
        self.face = metrics.ProgressFace(config.steps, step + 1, mode, examples_unit=self.program.task.unit)
        self._stack.callback(self.face.close)
        self.throughput = metrics.Throughput(config.batch_size, self._clock)
        if not self.cluster.is_main:
            return
        files.write_text(self.directory / "config.yaml", to_yaml(config, absolute_paths=True))
        files.write_json(self.directory / "environment.json", self._environment)
        self.sinks = [metrics.JsonlSink(self.directory / "metrics.jsonl", keep_through_step=step)]
        if config.log.tensorboard:
            self.sinks.append(metrics.TensorboardSink(self.directory / "tensorboard", keep_through_step=step))
        for sink in self.sinks:
            self._stack.callback(sink.close)
        self.sinks.append(self.face)

    # ---- every step --------------------------------------------------------------------------------------------------

    def push(self, step: int, values: dict[str, jax.Array], wait_s: float) -> None:
        """Takes the metrics of a dispatched step; waits for the device only at a log step, or with too many in flight."""
        self.step = step
        self.throughput.tick(step, wait_s)
        self._flying.append((step, values))
        if len(self._flying) > self._most_in_flight:
            jax.block_until_ready(self._flying.popleft())
        if step == 1 or step % self.config.log.every_steps == 0 or step == self.config.steps:
            self._log(step, values)
        elif self.cluster.is_main:
            self.face.advance(step)
        if self.config.profile is not None:
            self._profile(step, values)

    def _log(self, step: int, values: dict[str, jax.Array]) -> None:
        numbers = {name: float(value) for name, value in jax.device_get(values).items()}
        self._flying.clear()
        if self.checkpoints is not None:
            self._note_commits(self.checkpoints.check())
        speed = self.throughput.snapshot(step)
        # The first step of a process warms up; its speed says nothing.
        record = {"step": step, **numbers, **(speed if step > self._first_step else {})}
        for sink in self.sinks:
            sink.write(record)
        loss = numbers.get("loss", 0.0)
        if not math.isfinite(loss):
            if self.config.on_nonfinite == "stop":
                raise NonFiniteError(
                    f"the loss is {loss} at step {step} (it was {self._last_logged.get('loss', 'not logged before')} at step "
                    f"{int(self._last_logged.get('step', 0))}). A loss has to be finite. {self._newest()} Lower the learning rate, set clip_norm, "
                    "or look at the batches between those steps."
                )
            self.face.message(f"step {step}: the loss is {loss}")
        self._last_logged = {"step": step, **numbers}

    def _newest(self) -> str:
        if self.checkpoints is None:
            return "No checkpoints are kept."
        self._note_commits(self.checkpoints.wait())
        latest = self.checkpoints.latest()
        return f"The newest checkpoint is of step {latest}." if latest else "No checkpoint was saved yet."

    def _profile(self, step: int, values: Any) -> None:
        options = self.config.profile
        assert options is not None
        if step == options.start - 1 or (options.start == 1 and step == 1):
            jax.block_until_ready(values)
            jax.profiler.start_trace(str(self.directory / "profile"))
            self._trace_until = max(step, options.start - 1) + options.steps
        elif step == self._trace_until:
            jax.block_until_ready(values)
            jax.profiler.stop_trace()
            self._trace_until = None
            self.face.message(f"profile of {options.steps} steps: {self.directory / 'profile'}")

    # ---- when it is due ----------------------------------------------------------------------------------------------

    def evaluate_if_due(self, step: int, state: TrainState) -> None:
        """Evaluates every `eval.every_steps` steps, and after the last one."""
        every = self.config.eval.every_steps
        if self.program.has_eval and (step == self.config.steps or (every is not None and step % every == 0)):
            jax.block_until_ready(state.step)
            with self.throughput.paused():
                values = self.program.eval(state)
            self._last_eval = (step, values)
            for sink in self.sinks:
                sink.write({"step": step, "split": "eval", **values})

    def save_if_due(self, step: int, state: TrainState) -> None:
        """Saves every N steps, every N seconds on process 0's clock, and after the last step."""
        options = self.config.checkpoint
        if options is None:
            return
        late = options.every_seconds is not None and self._clock() - self._saved_at_time >= options.every_seconds
        by_time = self.cluster.agree_main("save", step, late, self._most_in_flight)
        by_step = options.every_steps is not None and step % options.every_steps == 0
        if by_time or by_step or step == self.config.steps:
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Saves the state of `step`, unless it is saved already. Returns when the arrays are copied; writing goes on behind.

        Raises:
            NonFiniteError: the state is not finite: it would replace a good checkpoint.
            CheckpointWriteError: this or an earlier save failed.
        """
        if self.checkpoints is None or self._saved_at_step == step:
            return
        jax.block_until_ready(state.step)
        with self.throughput.paused():
            bad = self.program.non_finite_leaf(state)
            if bad is not None:
                text = f"the state is not finite at step {step}: '{bad}'. It is not saved. {self._newest()}"
                if self.config.on_nonfinite == "stop" or step == self.config.steps:
                    raise NonFiniteError(
                        f"{text} Lower the learning rate or set clip_norm, and start again from there."
                    )
                self.face.message(text)
                return
            for sink in self.sinks:
                if isinstance(sink, metrics.JsonlSink):
                    sink.sync()
            fresh = self._last_eval is not None and self._last_eval[0] == step
            self.checkpoints.save(
                step, state, self._record(step), self._last_eval[1] if fresh and self._last_eval else None
            )
        self._saved_at_step, self._saved_at_time = step, self._clock()

    def _note_commits(self, steps: list[int]) -> None:
        for step in steps:
            self.events.write("saved", step=step)

    def _record(self, step: int) -> dict[str, Any]:
        return {
            "config": to_yaml(self.config),
            "settings": self._settings(),
            "next_batch": self.program.schedule.digest(step + 1),
            "versions": self._environment["versions"],
            "mesh": {axis: size for axis, size in self.program.sizes.items() if size > 1},
            "randomness": keys.identity(),
        }

    def should_stop(self, step: int, signals: StopSignals) -> bool:
        """Returns whether a process was asked to stop; True on every process at the same step."""
        return self.cluster.agree("stop", step, signals.requested is not None, self._most_in_flight)

    # ---- end ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits until everything is on disk, and writes the report.

        Raises:
            CheckpointWriteError: the last save did not commit.
        """
        if self._trace_until is not None:
            jax.profiler.stop_trace()
        if self.checkpoints is not None:
            self._note_commits(self.checkpoints.wait())
            # A process that left before process 0 has committed would make a launcher end process 0.
            self.cluster.barrier("committed")
        if self.cluster.is_main:
            self.face.close()
            metrics.write_report(self.directory)


def _described(randomness: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in randomness.items())


def latest_for_all(cluster: Cluster, checkpoints: Checkpoints) -> int | None:
    """Returns the newest committed step as process 0 sees it: a shared file system may show others an older one."""
    if cluster.num_processes == 1:
        return checkpoints.latest()
    if cluster.is_main:
        cluster.put("newest checkpoint", str(checkpoints.latest() or ""))
    return int(cluster.get("newest checkpoint") or 0) or None
