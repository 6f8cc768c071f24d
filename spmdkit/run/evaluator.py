"""The evaluator of TF_CONFIG: a process in addition to the training processes. It evaluates each new checkpoint until
the run is finished.

As in TensorFlow, it is not part of the cluster: training never waits for it, and it can be killed and restarted at any
time. It has separate devices (those of the config), reads `run_dir/checkpoints` and writes one line per step to
`run_dir/evaluator.jsonl`; listed steps are not evaluated again. Checkpoints that retention deletes first are skipped.
Source: tensorflow.org/guide/distributed_training, "TF_CONFIG" (task type "evaluator"); tf.estimator.train_and_evaluate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdkit.checkpoint import Checkpoints, hold_step
from spmdkit.cluster import ClusterSpec, join
from spmdkit.config import Config
from spmdkit.errors import CheckpointError, ConfigError, Preempted
from spmdkit.faults import StopSignals, report_and_exit
from spmdkit.foundation import phase
from spmdkit.foundation.files import not_writable, open_append
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.timeouts import EVALUATOR_POLL_S
from spmdkit.metrics import read_lines
from spmdkit.metrics.jsonl import record_line
from spmdkit.program.compile_cache import enable_cache
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.program import Program
from spmdkit.program.restore import checkpoints_of, restored
from spmdkit.program.task import Task
from spmdkit.run.hooks.finite import check_evaluation

FILE = "evaluator.jsonl"


def evaluate_each(
    config: Config,
    spec: ClusterSpec | None = None,
    task: Task | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
    print_line: Callable[[str], None] = lambda line: print(visible(line), flush=True),
) -> list[int]:
    """Returns the evaluated steps, once the last checkpoint of the finished run is evaluated.

    Raises:
        ConfigError: the run saves no checkpoints.
        Preempted: a signal requested a stop; start it again to continue.
        NonFiniteError: an evaluation that `on_nonfinite` does not permit.
    """
    if config.checkpoint is None:
        raise ConfigError(
            "this process is an evaluator, and checkpoint is null: there will be nothing to evaluate. Set checkpoint: "
            "{every_steps: 100}, or start no evaluator."
        )
    with enable_cache(config.compile_cache, config.folder):
        return _follow(config, spec, task, sleep, print_line)


def _follow(
    config: Config,
    spec: ClusterSpec | None,
    task: Task | None,
    sleep: Callable[[float], None],
    print_line: Callable[[str], None],
) -> list[int]:
    with StopSignals() as signals, signals.raise_on_signal(report_and_exit):
        cluster = join(spec or ClusterSpec(), config.devices)
        signals.reinstall()
        program = open_program(config, task or task_of(config), cluster.devices)
    if program.task.eval_data is None:
        raise ConfigError(
            "this process is an evaluator, and the task has no eval_data. Give Task(eval_data=...), or start no "
            "evaluator."
        )
    directory, steps = config.resolved_run_dir(), list[int]()
    evaluated = {line["step"] for line in read_lines(directory / FILE) if isinstance(line.get("step"), int)}
    print_line(f"evaluator of {directory}: each new checkpoint, into {FILE}")
    with StopSignals() as signals:
        while True:
            checkpoints = Checkpoints(checkpoints_of(config), is_main=False, cluster=cluster)
            before, new_steps = len(steps), [step for step in checkpoints.steps() if step not in evaluated]
            for step in new_steps:
                _check_signal(signals, len(steps))
                if (values := _evaluated(program, checkpoints, step)) is None:
                    continue  # deleted by retention
                evaluated.add(step)
                steps.append(step)
                _write(directory / FILE, step, values)
                values_text = (f"{name} {x:.6g}" for name, x in values.items() if isinstance(x, float))
                print_line(f"step {step} eval  " + "  ".join(values_text))
                check_evaluation(config, step, values)
            _check_signal(signals, len(steps))
            if not new_steps and _is_finished(checkpoints, program.config.num_steps):
                return steps
            if len(steps) == before:
                sleep(EVALUATOR_POLL_S)


def _check_signal(signals: StopSignals, num: int) -> None:
    if signals.requested is not None:
        raise Preempted(f"the evaluator was stopped after {num} checkpoints. Start it again to continue.")


def _evaluated(program: Program, checkpoints: Checkpoints, step: int) -> dict[str, Any] | None:
    """Returns the metrics of a checkpoint; None if it was deleted."""

    def choose() -> int:
        if step not in checkpoints.steps():
            raise FileNotFoundError
        return step

    try:
        with hold_step(checkpoints.directory, choose), phase.during("restore"):
            state, *_ = restored(checkpoints, step, program)
    except (CheckpointError, FileNotFoundError):
        if step not in checkpoints.steps():
            return None
        raise
    with phase.during("evaluation"):
        return dict(program.eval(state))


def _is_finished(checkpoints: Checkpoints, last: int) -> bool:
    """Returns whether the newest checkpoint is the last of the run: of the last step, or of the step at which a hook
    ended it."""
    newest = checkpoints.latest()
    if newest is None or newest >= last:
        return newest is not None
    try:
        return bool(checkpoints.read_record(newest).get("finished"))
    except CheckpointError:
        return False


def _write(path: Path, step: int, values: dict[str, Any]) -> None:
    plain = {name: x if isinstance(x, float) else x.tolist() for name, x in values.items()}
    line = record_line({"step": step, "split": "eval", **plain}, arrays=True)
    try:
        with os.fdopen(open_append(path), "a") as file:
            file.write(line)
    except OSError as error:
        raise not_writable(path, error) from error
