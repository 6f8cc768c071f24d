"""Training with a parameter server. This process is the coordinator: it initializes or restores, monitors, logs,
evaluates and saves. Workers compute.

An applied update corresponds to a step of a synchronous run. Records, evaluations and checkpoints are made at the first
poll after they are due, so their steps need not be multiples of the interval. A checkpoint has the format of a
synchronous run, with the servers' tables in its record. Both kinds of run can resume from it.
"""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from spmdkit.cluster import Cluster
from spmdkit.config import Config, replace_keys
from spmdkit.config.parameter_server import options
from spmdkit.errors import ConfigError, NonFiniteError, Preempted, RendezvousError
from spmdkit.foundation import phase
from spmdkit.foundation.files import read_regular
from spmdkit.foundation.timeouts import SERVER_POLL_S, SERVER_WORKERS_S
from spmdkit.foundation.trees import tree_bytes
from spmdkit.parameter_server.coordinator import Coordinator, WorkerStats
from spmdkit.parameter_server.gradient import synchronous
from spmdkit.parameter_server.roles import Roles
from spmdkit.parameter_server.threads import Threads
from spmdkit.parameter_server.transport import Transport, Unavailable
from spmdkit.program.compile_cache import Programs
from spmdkit.program.learning_rate import learning_rate
from spmdkit.program.memory import peak_memory
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.run.actions import evaluate, save
from spmdkit.run.hooks.base import Stop
from spmdkit.run.hooks.finite import format_metrics, not_finite
from spmdkit.run.recovery import rollback
from spmdkit.run.run import Run
from spmdkit.step.state import TrainState

RECORD = "parameter_server"
"""The key of the servers' tables in a checkpoint's record."""
JOIN = "workers"
"""A file in the run's directory with the requested number of workers, so that more can join."""


class ParameterServerTrainer:
    """Trains with servers and workers from the coordinator. See `spmdkit.run.trainer.Trainer`."""

    _roles: Roles

    def program_config(self, config: Config) -> Config:
        return synchronous(config)

    def open(self, config: Config, cluster: Cluster, program: Program, task: Task | None) -> Config:
        """Raises ConfigError if the task cannot be trained with servers, Ray is not installed, or several processes
        were started."""
        _check(config, cluster, task)
        chosen = program.config
        config = replace_keys(config, {"microbatches": chosen.microbatches, "remat": chosen.model_dump()["remat"]})
        self._roles = Roles(config, program.task)
        return config

    def compile(self, run: Run, cache: Programs, limit_bytes: int | None, retain_memory: bool) -> None:
        pass  # workers compile their steps

    def train(self, run: Run, state: TrainState) -> tuple[TrainState, Stop | None]:
        """Returns the state after the last update, or after a requested stop, and the action that stopped the run."""
        roles = self._roles
        transport = _transport(run, roles)
        if run.signals is not None:
            run.signals.reinstall()  # Ray has just replaced the handler of SIGTERM
        try:
            return _Monitor(run, state, transport, roles).run_until_done()
        except Unavailable as error:
            raise RendezvousError(
                f"a stop was requested while a server was down ({error}), so its state is lost. {run.newest()} Start "
                "the same command again."
            ) from error
        finally:
            transport.close()


trainer = ParameterServerTrainer
"""The trainer of `sync: parameter_server`, for `spmdkit.run.trainer`."""


def _check(config: Config, cluster: Cluster, task: Task | None) -> None:
    if options(config).transport == "ray":
        from spmdkit.parameter_server.actors import import_ray

        if importlib.util.find_spec("ray") is None:
            import_ray()  # raises, with the command that installs it
        if task is not None:
            raise ConfigError(
                "sync: parameter_server on Ray, and train received a task: servers and workers are other processes, "
                "which import the task by the config. Name it there (task: file.py:name), or use transport: threads."
            )
    if cluster.num_processes > 1:
        raise ConfigError(
            f"sync: parameter_server in {cluster.num_processes} processes: it starts its servers and workers itself. "
            "Start one process, without launch: spmdkit train CONFIG."
        )


def _transport(run: Run, roles: Roles) -> Transport:
    options = roles.options
    if options.transport == "threads":
        return Threads(lambda number: roles.server(number, donate=False), partial(roles.worker, run.cluster.devices))
    from spmdkit.parameter_server.actors import Actors

    num_bytes = tree_bytes(run.program.abstract_state.params)
    return Actors(run.config, run.directory, options.address, options.servers + options.workers, num_bytes)


class _Monitor:
    """The coordinator's loop over one run."""

    def __init__(self, run: Run, state: TrainState, transport: Transport, roles: Roles):
        self.run, self._state, self._servers, self._turn = run, state, roles.options.servers, roles.turn
        self._is_one_process = roles.options.transport == "threads"
        self._tables = saved_tables(run)
        life = max((life for table in self._tables or () for _, life, *_ in table["last_push"]), default=-1) + 1
        numbers = roles.options.servers, roles.options.workers
        self.coordinator = Coordinator(
            transport, roles.optimizer, roles.owned, *numbers, self._load, self._is_stopping, life
        )
        self._began = False
        self._logged = (time.monotonic(), run.step)
        self._window: list[dict[str, Any]] = []
        self._evaluated = run.step
        # Applied updates, pushes skipped before the last of them, and pushes skipped in total.
        self._skipped: tuple[int, int, int] | None = None

    def _is_stopping(self) -> bool:
        return self.run.signals is not None and self.run.signals.requested is not None

    def _load(self) -> tuple[TrainState, list[dict[str, Any]] | None]:
        """Returns the initial state of the servers, or on a repeated call the last saved one."""
        run = self.run
        if self._began:
            with phase.during("restore"):
                self._state = rollback.go_back(run, None, 0)
            self._tables = saved_tables(run)
            self._window, self._logged, self._evaluated = [], (time.monotonic(), run.step), run.step
        self._began = True
        return self._state, self._tables

    def run_until_done(self) -> tuple[TrainState, Stop | None]:
        run, coordinator = self.run, self.coordinator
        of_worker = {axis: size for axis, size in run.program.sizes.items() if size > 1}
        counts = {"servers": self._servers, "workers": coordinator.num_workers, "worker_mesh": of_worker}
        run.events.write("roles", step=run.step, coordinator=run.cluster.process_index, **counts)
        with phase.during("servers"):
            self._report(coordinator.start())
            for number in coordinator.wait_for_workers(SERVER_WORKERS_S):
                why = coordinator.why_waiting()
                run.message(f"worker {number} has not started after {SERVER_WORKERS_S:.0f} s: {why}")
            coordinator.install()
        while True:
            if self._is_stopping():
                return self._stopped(Stop(Preempted.exit_code))
            stats = coordinator.watch()
            self._report(stats.events)
            self._note(stats)
            self._check_skipped(stats)
            self._join()
            if stats.restored_updates is None and stats.applied >= run.config.num_steps:
                return self._stopped(None)
            if stats.restored_updates is None:
                self._due(stats)
            time.sleep(SERVER_POLL_S)

    def _join(self) -> None:
        """Starts the additional workers that the file requests."""
        try:
            requested = int(read_regular(self.run.directory / JOIN, 64))
        except (OSError, ValueError):
            return
        while self.coordinator.num_workers < requested:
            self._report([self.coordinator.join()])

    def _report(self, events: Any) -> None:
        for event, fields in events:
            self.run.events.write(event, **{"step": self.run.step, **fields})
            if "lost" in event or "restored" in event:
                self.run.message(f"{event}: " + ", ".join(f"{k} {v}" for k, v in fields.items() if v != ""))

    def _note(self, stats: WorkerStats) -> None:
        """Records applied updates."""
        run = self.run
        self._window += stats.records
        if stats.restored_updates is None and stats.applied > run.step:
            run.dispatched(stats.applied, {}, 0.0)
            phase.enter("step", stats.applied)
            run.reporter.progress.advance(stats.applied)

    def _check_skipped(self, stats: WorkerStats) -> None:
        """Reports skipped pushes. Raises NonFiniteError after `on_nonfinite.max_consecutive` since the last update."""
        run, most, skipped = self.run, self.run.config.on_nonfinite.max_consecutive, stats.dropped.get("skipped", 0)
        if stats.restored_updates is not None or stats.applied < run.step:
            self._skipped = None  # servers are unreachable, or have restarted with reset counts
            return
        applied, at_update, before = self._skipped or (stats.applied, skipped, skipped)
        self._skipped = stats.applied, at_update if applied == stats.applied else skipped, skipped
        if (more := skipped - before) > 0:
            run.message(f"skipped: {more} push{'es' * (more > 1)} not finite, by update {stats.applied}")
            run.events.write("skipped", step=stats.applied, pushes=more)
        if (num := skipped - self._skipped[1]) >= most:
            raise NonFiniteError(
                f"{num} pushes in a row were skipped after update {stats.applied}: loss, gradient or a metric is not "
                f"finite in each (on_nonfinite.max_consecutive: {most}). {run.newest()} Lower the learning rate, set "
                "clip_norm, or check the data."
            )

    def _stopped(self, stop: Stop | None) -> tuple[TrainState, Stop | None]:
        """Evaluates and saves the final state, and returns it."""
        run = self.run
        while (snapshot := self.coordinator.snapshot()) is None:
            self._report(self.coordinator.watch().events)
            time.sleep(SERVER_POLL_S)
        state = self._placed(*snapshot)
        self._log(self.coordinator.watch())
        if stop is None:
            self._evaluate(state)
        with self._turn:
            save(run, run.step, state)
        phase.enter("end", run.step)
        return state, stop

    def _evaluate(self, state: TrainState) -> None:
        """Evaluates. Raises NonFiniteError if the result is not finite, unless `on_nonfinite.evaluation` permits it."""
        run = self.run
        with self._turn:
            evaluate(run, run.step, state)
        if isinstance(turn := run.hook_runner.more().turn, Stop):
            with self._turn:
                save(run, run.step, state)
            raise NonFiniteError(f"{turn.why} {run.newest_committed()}")

    def _placed(self, state: TrainState, tables: list[dict[str, Any]]) -> TrainState:
        """Returns a snapshot on the devices of this process, and stores its tables for the checkpoint's record."""
        self.run.record_snapshot(int(state.step), {RECORD: {"servers": tables}})
        state = jax.device_put(state, self.run.program.state_sharding)
        return state

    def _due(self, stats: WorkerStats) -> None:
        run, config = self.run, self.run.config
        crossed: Callable[[int | None, int], bool] = lambda every, last: (
            every is not None and stats.applied // every > last // every
        )
        if crossed(config.log.every_steps, self._logged[1]) or (self._logged[1] == 0 and self._window):
            self._log(stats)
        is_save = False
        if (saves := config.checkpoint) is not None and run.saves is not None:
            is_overdue = saves.every_seconds is not None and run.clock() - run.saves.tried_at >= saves.every_seconds
            is_overdue = is_overdue and stats.applied > run.saved_step
            is_save = is_overdue or crossed(saves.every_steps, run.saved_step)
        is_eval = run.program.has_eval and crossed(config.eval.every_steps, self._evaluated)
        if not (is_save or is_eval) or (snapshot := self.coordinator.snapshot()) is None:
            return
        state = self._placed(*snapshot)
        if is_eval:
            self._evaluated = run.step
            self._evaluate(state)
        if is_save:
            with self._turn:
                save(run, run.step, state)

    def _log(self, stats: WorkerStats) -> None:
        """Logs the interval since the last record: means over pushes, and the progress of the workers."""
        run, (before_s, before) = self.run, self._logged
        records, self._window = [*self._window, *stats.records], []
        now = time.monotonic()
        if not records:
            return
        step, elapsed_s = max(record["step"] for record in records), now - before_s
        self._logged = now, step
        run.report_saves()
        progress = {f"worker_{worker}_pushes": float(num) for worker, num in sorted(stats.progress.items())}
        progress["pushes_dropped"] = float(sum(stats.dropped.values()))
        tokens = run.program.num_tokens(run.program.abstract_batch)
        rate, values = rates(records, step - before, elapsed_s, run.config.largest_batch, tokens), means(records)
        if bad := not_finite(values):  # already applied: on_nonfinite is continue
            run.message(f"step {step}: {format_metrics(bad)}")
        more = {"learning_rate": learning_rate(run.config, (), step)}
        if self._is_one_process:
            more["peak_memory_bytes"] = peak_memory(run.cluster.devices)
        known = {name: x for name, x in more.items() if x is not None}
        run.record_metrics(step, {**values, **rate, **progress}, known)
        counts = [stats.histogram.get(i, 0) for i in range(max(stats.histogram, default=0) + 1)]
        run.write({"step": step, "staleness_counts": counts}, kind="array")


def means(records: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the mean of each metric over pushes, weighted by the count of the loss, and the mean staleness."""
    total = sum(record["weight"] for record in records) or 1.0
    mean: Callable[[Callable[..., float]], float] = lambda value: (
        sum(value(record) * record["weight"] for record in records) / total
    )
    names = records[-1].get("metrics", {})
    metrics = {"loss": mean(lambda record: record["loss"])}
    metrics |= {name: mean(lambda record, name=name: record["metrics"][name]) for name in names}
    staleness = [record["staleness"] for record in records]
    return metrics | {"staleness": sum(staleness) / len(staleness), "staleness_max": float(max(staleness))}


def rates(
    records: list[dict[str, Any]], updates: int, elapsed_s: float, batch_size: int, tokens: int = 0
) -> dict[str, float]:
    """Returns pushes, examples, tokens (`tokens` per batch; 0: not counted) and seconds per update over an interval,
    and the pushes of each worker."""
    if elapsed_s <= 0 or updates <= 0:
        return {}
    of_worker = Counter(record["worker"] for record in records)
    return {
        "examples_per_s": len(records) * batch_size / elapsed_s,
        **({"tokens_per_s": len(records) * tokens / elapsed_s} if tokens else {}),
        "step_time_s": elapsed_s / updates,
        "pushes_per_s": len(records) / elapsed_s,
        **{f"worker_{worker}_pushes_per_s": num / elapsed_s for worker, num in sorted(of_worker.items())},
    }


def saved_tables(run: Run) -> list[dict[str, Any]] | None:
    """Returns the servers' tables from the run's checkpoint; None without a checkpoint, or if a synchronous run saved
    it."""
    if run.checkpoints is None or not run.step or run.step not in run.checkpoints.steps():
        return None
    record: Mapping[str, Any] = run.checkpoints.read_record(run.step).get(RECORD) or {}
    return record.get("servers")
