"""Restore: a run continues from the newest intact checkpoint, the same on every process.

Process 0 verifies the record and the files of a checkpoint, then each process the array bytes that it reads. Damage on
one process rejects the checkpoint on all. Damaged checkpoints are renamed only after an intact one is restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.checkpoint import Checkpoints, best_step, hold_step, newest_step, quarantine
from spmdkit.cluster import Cluster
from spmdkit.errors import CheckpointError, DamagedError
from spmdkit.foundation import run_status
from spmdkit.metrics import read_lines
from spmdkit.program.program import Program
from spmdkit.program.restore import restored
from spmdkit.run.hooks.base import RunView
from spmdkit.step import rng
from spmdkit.step.state import TrainState

RECORDS = ("metrics.jsonl", "counts.jsonl")
MAX_LISTED = 10


class Restored(NamedTuple):
    """The state from which a run continues. `record`: None for the state before step 1. `wrong`: newer checkpoints and
    their damage. `lines`: messages for the user. `is_saved`: whether its step is committed on disk. `missing`: newer
    steps that were committed and do not exist."""

    step: int
    state: TrainState
    record: dict[str, Any] | None
    lines: list[str]
    wrong: dict[str, str]
    is_saved: bool = True
    missing: tuple[int, ...] = ()


def initial_state(
    cluster: Cluster,
    checkpoints: Checkpoints | None,
    program: Program,
    most: int | None = None,
    reset: Sequence[str] = (),
    run_dir: Path | None = None,
    may_lose: bool = False,
) -> Restored:
    """Returns the state from which a run continues: the newest intact checkpoint up to step `most`, otherwise the state
    before step 1, of `init_from` or `init`.

    Args:
        run_dir: raises CheckpointError if a run has trained there and none of its checkpoints is left.
        may_lose: do not raise it (`train --allow-change checkpoints`).
    """
    found = None if checkpoints is None else newest_good(cluster, checkpoints, program, most, reset)
    missing: list[int] = []
    if checkpoints is not None and run_dir is not None:
        missing = missing_steps(cluster, checkpoints, run_dir, None if found is None else found.step, may_lose)
    return (state_before_step_1(cluster, program) if found is None else found)._replace(missing=tuple(missing))


def state_before_step_1(cluster: Cluster, program: Program) -> Restored:
    """Returns the state of `init_from`, otherwise of `init`. All processes read the same leaves."""
    if (loaded := program.init_from) is not None:
        facts = {"leaves": f"{loaded.facts}\n", "init": program.initial.lowered.as_text()}
        cluster.same_everywhere("init_from", lambda: facts)
    return Restored(0, program.init(), None, [] if loaded is None else loaded.notes, {}, is_saved=False)


def newest_good(
    cluster: Cluster, checkpoints: Checkpoints, program: Program, most: int | None = None, reset: Sequence[str] = ()
) -> Restored | None:
    """Returns the newest intact checkpoint up to step `most`; None if there is no checkpoint. Raises CheckpointError if
    all checkpoints are damaged, or the newest intact one is of a different model."""
    directory, wrong = checkpoints.directory, dict[int, str]()
    choose = lambda: quarantine.newest_valid(directory, most, wrong)
    while True:
        step, damaged = cluster.from_main("newest intact checkpoint", choose)
        wrong |= {int(newer): why for newer, why in damaged.items()}
        if step is None:
            break
        why, found = "", None
        try:
            again = checkpoints.read_record(step).get("reset") == list(reset)  # a restart of the same command
            found = restored(checkpoints, step, program, reset, again)
        except DamagedError as error:
            why = error.found
        why = cluster.first_problem("restored checkpoint", partial(str, why))
        if not why and found is not None:
            return Restored(step, *found, {str(newer): what for newer, what in wrong.items()})
        wrong[step] = why
    if wrong:
        raise quarantine.no_valid_checkpoint(directory, {str(step): why for step, why in wrong.items()})
    return None


def quarantine_checkpoints(
    run: RunView, checkpoints: Checkpoints | None, found: Restored, lines: Sequence[str] = ()
) -> None:
    """Renames damaged checkpoints and incomplete step folders on process 0, and reports them, missing ones and
    `lines`."""
    if checkpoints is not None and run.cluster.is_main:
        directory = checkpoints.directory
        for name, why in (quarantine.steps_without_record(directory) | found.wrong).items():
            renamed = quarantine.quarantine(directory, name)
            run.events.write("checkpoint_quarantined", name=name, renamed=renamed, why=why)
            run.message(f"checkpoint {name} is damaged: {why}. It is renamed to {directory / renamed}")
        if found.missing:
            run.events.write("checkpoints_missing", step=found.step, steps=found.missing)
            run.message(
                f"WARNING: {directory} does not have {_listed(found.missing)}, which events.jsonl records as saved. "
                f"Training continues from step {found.step} and repeats the later ones. To continue from a later step, "
                "stop this run and restore their folders."
            )
    for line in lines:
        run.message(line)
    if found.wrong:
        run.message(f"continuing from step {found.step}, the newest intact checkpoint")


def missing_steps(
    cluster: Cluster, checkpoints: Checkpoints, run_dir: Path, step: int | None, may_lose: bool
) -> list[int]:
    """Returns the steps after `step` that this run has committed and that do not exist, the same on every process.

    Args:
        step: the step to restore; None: there is no checkpoint.
        may_lose: do not raise.

    Raises:
        CheckpointError: none of the committed steps is left: the run would silently restart from an older state.
    """

    def found() -> tuple[list[int], str]:
        directory, metrics = checkpoints.directory, run_dir / "metrics.jsonl"
        committed = run_status.committed_steps(run_dir)
        incomplete = quarantine.steps_without_record(directory)
        have = set(checkpoints.steps())
        missing = sorted(each for each in committed - have - {*map(int, incomplete)} if step is None or each > step)
        if may_lose or committed & have:
            return missing, ""
        trained = last_step(metrics) if committed or step is None else 0
        if not committed and (not trained or read_lines(run_dir / "events.jsonl")):
            return missing, ""
        damaged = f" ({', '.join(incomplete)}: no record)" if incomplete else ""
        holds = f"no checkpoint{damaged}" if step is None else f"step {step}, which this run has not saved"
        saved = f", and events.jsonl records {_listed(sorted(committed))} as saved" if committed else ""
        return missing, (
            f"{directory} holds {holds}; a run was trained here up to step {trained} (metrics.jsonl){saved}. A run "
            "never silently restarts from an older step. Restore the folder (is its disk mounted?), or set run_dir to "
            f"a new folder. To continue from step {step or 0}: train --allow-change checkpoints."
        )

    missing, why = cluster.from_main("lost checkpoints", found)
    if why:
        raise CheckpointError(why)
    return list(missing)


def _listed(steps: Sequence[int]) -> str:
    shown = [*map(str, steps[-MAX_LISTED:])]
    older = f" (and {len(steps) - MAX_LISTED} older)" if len(steps) > MAX_LISTED else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(shown)}{older}"


def rename_old_records(run_dir: Path) -> list[str]:
    """Renames the metrics of a run without checkpoints; returns a message per file."""
    lines = []
    for name in RECORDS:
        path = run_dir / name
        if last := last_step(path):
            number = next(n for n in range(1, 10**9) if not path.with_suffix(f".{n}.jsonl").exists())
            renamed = path.rename(path.with_suffix(f".{number}.jsonl"))
            lines.append(
                f"note: {name} belongs to a run up to step {last} without checkpoint; renamed to {renamed.name}"
            )
    return lines


def last_step(path: Path) -> int:
    """Returns the last step in a file of JSON lines; 0 if there is none."""
    return max((line["step"] for line in read_lines(path) if isinstance(line.get("step"), int)), default=0)


def latest_for_all(cluster: Cluster, checkpoints: Checkpoints) -> int | None:
    """Returns the newest committed step on process 0: a shared file system may show an older one to other processes."""
    step: int | None = cluster.from_main("newest checkpoint", lambda: max(checkpoints.steps(), default=None))
    return step


@contextlib.contextmanager
def chosen_for_all(cluster: Cluster, checkpoints: Checkpoints, step: int | None, best: bool) -> Iterator[int | None]:
    """Yields `step`, the best step, or the newest, the same on every process, and protects it from deletion; None if
    there is none."""
    directory = checkpoints.directory
    pick = (lambda: best_step(directory)) if best else (lambda: newest_step(directory) if step is None else step)
    with contextlib.ExitStack() as stack:
        choose = lambda: stack.enter_context(hold_step(directory, pick)) if checkpoints.steps() else None
        yield cluster.from_main("chosen checkpoint", choose)


def note_randomness(run: RunView, record: dict[str, Any], step: int) -> None:
    """Reports a change of the random number generator: the next steps then use different keys."""
    before, now = record.get("randomness", {"version": 1}), rng.identity()
    if before != now:
        described: Callable[[Any], str] = lambda keys: ", ".join(f"{name} {value}" for name, value in keys.items())
        run.events.write("randomness_changed", step=step, before=before, now=now)
        run.message(
            f"note: step {step} was saved under other random keys ({described(before)}; now {described(now)}): "
            "randomness continues differently from here, so dropout and noise differ from an uninterrupted run"
        )
