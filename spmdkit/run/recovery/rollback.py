"""Rollback: a run returns to an earlier checkpoint or to its initial state, and may skip batches permanently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import UserCodeError
from spmdkit.run.hooks.base import RunView
from spmdkit.run.recovery import restore, skipped_batches
from spmdkit.run.recovery.save_retries import Saves
from spmdkit.run.reporter import Reporter
from spmdkit.run.startup import bucket
from spmdkit.step.state import TrainState


class Returnable(RunView, Protocol):
    """A run that can return to an earlier step."""

    checkpoints: Checkpoints | None
    saves: Saves | None
    reporter: Reporter
    reset: tuple[str, ...]

    def return_to(self, found: restore.Restored) -> None: ...


def go_back(run: Returnable, to_step: int | None, skip_batches: int, batches: Sequence[int] = ()) -> TrainState:
    """Returns the state of the newest checkpoint up to `to_step`, or the initial state if there is none.

    Trackers, the schedule and the hooks are reset to that step; newer checkpoints are deleted.

    Raises:
        UserCodeError: the checkpoints up to that step were deleted.
    """
    from_step, before = run.step, run.program.schedule.skipped
    if run.saves is not None:
        run.saves.finish_save()
    found = restore.initial_state(run.cluster, run.checkpoints, run.program, to_step, run.reset)
    target = found.step
    if run.checkpoints is not None:
        newest = restore.latest_for_all(run.cluster, run.checkpoints)
        if not target and newest is not None and to_step != 0:
            raise UserCodeError(
                f"a hook rolls back to step {to_step}, and all checkpoints are newer, up to step {newest}. A rollback "
                "needs a checkpoint of that step or before. Raise checkpoint.keep "
                f"({run.config.checkpoint.keep if run.config.checkpoint else 0}), or roll back less far; "
                "sk.Rollback(0) restarts from the initial state."
            )
        restore.quarantine_checkpoints(run, run.checkpoints, found)
        run.cluster.barrier("before going back")
        run.checkpoints.delete_after(target)
        run.cluster.barrier("went back")
    run.return_to(found)
    more = skipped_batches.add(run.program, target, before, skip_batches, batches)
    skipped_batches.write(run.directory, run.cluster, run.program.schedule.skipped)
    bucket.upload_skipped(run.config, run.cluster, run.directory)
    if run.cluster.is_main:
        run.reporter.trackers.rewind(target)
    run.events.write("rolled_back", step=target, from_step=from_step, skipped_batches=more)
    skipped = f", {len(more)} batch{'es' * (len(more) > 1)} skipped permanently" if more else ""
    run.message(f"rolled back to step {target} from step {from_step}{skipped}")
    run.reporter.throughput.start()
    return found.state
