"""Where a run goes on: the newest checkpoint that is as it was written, the same on every process; what is damaged is
set aside and said.

A checkpoint is looked at twice: its record and its files by process 0, before anybody reads it, and the bytes of its
arrays by whoever reads them. Damage that one process finds is damage to all. Nothing is renamed before a good one is
found and belongs to this run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spmdkit.checkpoint import Checkpoints, best_step, hold_step, newest_step, quarantine
from spmdkit.cluster import Cluster
from spmdkit.errors import CheckpointError, DamagedError
from spmdkit.foundation.timeouts import SAVE_ABANDON_S
from spmdkit.metrics import read_lines
from spmdkit.program.program import Program
from spmdkit.program.restore import restored
from spmdkit.step import rng
from spmdkit.step.state import TrainState

if TYPE_CHECKING:
    from spmdkit.run.run import Run

RECORDS = ("metrics.jsonl", "counts.jsonl")


class Restored(NamedTuple):
    """A checkpoint that was restored. `wrong`: what is wrong with the newer ones, which were passed over; `lines` are
    for the user."""

    step: int
    state: TrainState
    record: dict[str, Any]
    lines: list[str]
    wrong: dict[str, str]
    is_saved: bool = True


def newest(run: Run) -> Restored | None:
    """Returns what the memory of the processes holds, where that is newer than every checkpoint, otherwise the newest
    that can be restored, None where there is neither."""
    in_memory = run.driver.restored(run.cluster, run.program, run.checkpoints)
    if in_memory is not None or run.checkpoints is None:
        return in_memory
    return newest_good(run.cluster, run.checkpoints, run.program)


def abandon(run: Run) -> None:
    """Lets a save end that will never be committed, since a process that was to write a part of it has died."""
    if run.checkpoints is not None:
        run.checkpoints.abandon(SAVE_ABANDON_S)


def newest_good(
    cluster: Cluster, checkpoints: Checkpoints, program: Program, most: int | None = None
) -> Restored | None:
    """Returns the newest checkpoint up to `most` that can be restored, None where there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged; or one is of another model.
    """
    directory, wrong = checkpoints.directory, dict[int, str]()
    while True:

        def choose(wrong: dict[int, str] = wrong) -> dict[str, Any]:
            step, found = quarantine.newest_valid(directory, most, wrong)
            return {"step": step, "wrong": wrong | found}

        chosen = cluster.from_main("newest intact checkpoint", choose)
        wrong |= {int(step): why for step, why in chosen["wrong"].items()}
        step = chosen["step"]
        if step is None:
            break
        why, found = "", None
        try:
            found = restored(checkpoints, step, program)
        except DamagedError as error:
            why = error.found
        why = cluster.first_problem("restored checkpoint", partial(str, why))
        if not why and found is not None:
            return Restored(step, *found, {str(newer): what for newer, what in wrong.items()})
        wrong[step] = why
    if wrong:
        raise quarantine.no_valid_checkpoint(directory, {str(step): why for step, why in wrong.items()})
    return None


def quarantine_checkpoints(run: Run, wrong: Mapping[str, str], lines: Sequence[str], step: int) -> None:
    """Renames, on process 0, what is damaged and what has a step's name and is none, and tells the user, with `lines`
    of what was restored."""
    if run.checkpoints is not None and run.cluster.is_main:
        directory = run.checkpoints.directory
        for name, why in (quarantine.steps_without_record(directory) | dict(wrong)).items():
            renamed = quarantine.quarantine(directory, name)
            run.events.write("checkpoint_quarantined", name=name, renamed=renamed, why=why)
            run.message(f"checkpoint {name} is damaged: {why}. It is kept as {directory / renamed}")
    for line in lines:
        run.message(line)
    if wrong:
        run.message(f"going on from step {step}, the newest checkpoint that is as it was written")


def require_checkpoint(cluster: Cluster, checkpoints: Checkpoints, run_dir: Path) -> None:
    """Raises CheckpointError where a run has trained and saved here, and its checkpoints are gone: it would start over
    without a word.

    Whoever wants that moves metrics.jsonl away.
    """

    def found() -> str:
        last = _last_step(run_dir / "metrics.jsonl")
        events = read_lines(run_dir / "events.jsonl")
        saved = [
            event["step"] for event in events if event.get("event") == "saved" and isinstance(event.get("step"), int)
        ]
        if not last or (events and not saved):
            return ""
        left = quarantine.steps_without_record(checkpoints.directory)
        beside = f" but {', '.join(left)} without a record" if left else ""
        newest = f", and step {saved[-1]} was saved" if saved else ""
        return (
            f"{checkpoints.directory} holds no checkpoint{beside}; a run was trained here up to step {last} (metrics.jsonl){newest}. A run never "
            f"starts over without a word. Bring the folder back (is its disk mounted?), or, to start anew, move {run_dir / 'metrics.jsonl'} away "
            "or set run_dir to a new folder."
        )

    if text := cluster.from_main("lost checkpoints", found):
        raise CheckpointError(text)


def keep_old_records(run_dir: Path) -> list[str]:
    """Renames the metrics of a run that was never saved, so that starting anew does not empty them; returns a line for
    the user of each."""
    lines = []
    for name in RECORDS:
        path = run_dir / name
        if last := _last_step(path):
            number = next(n for n in range(1, 10**9) if not path.with_suffix(f".{n}.jsonl").exists())
            kept = path.rename(path.with_suffix(f".{number}.jsonl"))
            lines.append(
                f"note: {name} was of a run up to step {last} that has no checkpoint; it is kept as {kept.name}"
            )
    return lines


def _last_step(path: Path) -> int:
    return max((line["step"] for line in read_lines(path) if isinstance(line.get("step"), int)), default=0)


def latest_for_all(cluster: Cluster, checkpoints: Checkpoints) -> int | None:
    """Returns the newest committed step as process 0 sees it: a shared file system may show others an older one."""
    step: int | None = cluster.from_main("newest checkpoint", lambda: max(checkpoints.steps(), default=None))
    return step


@contextlib.contextmanager
def chosen_for_all(cluster: Cluster, checkpoints: Checkpoints, step: int | None, best: bool) -> Iterator[int | None]:
    """Yields `step`, the best step, or the newest, the same on every process, which nobody deletes meanwhile; None
    where there is none."""
    directory = checkpoints.directory
    with contextlib.ExitStack() as stack:

        def choose() -> int | None:
            if not checkpoints.steps():
                return None
            pick = (
                (lambda: best_step(directory)) if best else (lambda: newest_step(directory) if step is None else step)
            )
            return stack.enter_context(hold_step(directory, pick))

        yield cluster.from_main("chosen checkpoint", choose)


def note_randomness(run: Run, record: dict[str, Any], step: int) -> None:
    """Says so where the keys of the coming steps are not those that the run would have had before."""
    before, now = record.get("randomness", {"version": 1}), rng.identity()
    if before != now:
        run.events.write("randomness_changed", step=step, before=before, now=now)
        run.message(
            f"note: step {step} was saved under other random keys ({_described(before)}; now {_described(now)}): randomness "
            "continues differently from here, dropout and noise are not what they would have been"
        )


def _described(randomness: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in randomness.items())
