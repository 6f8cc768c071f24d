"""Emergency save: if the data or a hook raises, a run of one process saves the state of its last complete step, within
`checkpoint.emergency_timeout_s` seconds.

After an error inside a step (`jax.debug.callback`) the state is lost, because the step reuses the memory of its input.
A run of several processes does not save: the other processes are inside the next step.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import jax

from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import CheckpointWriteError, HangError, NonFiniteError, Preempted, RendezvousError
from spmdkit.faults.error_mapping import describe_callback, describe_out_of_memory
from spmdkit.foundation import phase
from spmdkit.run.hooks.base import RunView
from spmdkit.run.recovery.save_retries import Saves
from spmdkit.run.reporter import Reporter
from spmdkit.step.state import TrainState

NOT_SAVED = (CheckpointWriteError, HangError, NonFiniteError, Preempted, RendezvousError)
"""Errors after which there is no state to save, or a save is impossible."""


class Saveable(RunView, Protocol):
    """The part of a run with checkpoints that an emergency save uses."""

    checkpoints: Checkpoints | None
    saves: Saves | None
    reporter: Reporter

    def record(self, step: int) -> dict[str, Any]: ...


def save_before_exit(run: Saveable, state: TrainState, error: BaseException) -> None:
    """Saves `state` of `run.step` before `error` ends the run, and logs the result. Never raises, and takes at most
    `checkpoint.emergency_timeout_s`."""
    options, step, checkpoints = run.config.checkpoint, run.step, run.checkpoints
    if options is None or checkpoints is None or options.emergency_timeout_s is None or isinstance(error, NOT_SAVED):
        return
    if run.cluster.num_processes > 1 or step == checkpoints.saved_step:
        return
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return
    results: list[str] = []
    save = lambda: results.append(_save(run, checkpoints, step, state))
    thread = threading.Thread(target=save, name="spmdkit-emergency-save", daemon=True)
    with phase.during("save"):
        thread.start()
        thread.join(options.emergency_timeout_s)
    if thread.is_alive():
        checkpoints.abandon(0)
        results.append(f"was not saved within {options.emergency_timeout_s:g} s (checkpoint.emergency_timeout_s)")
    if not results[0]:
        return
    text = f"step {step}, the last good one, {results[0]}"
    run.events.write("emergency_saved", step=step, why=text)
    run.message(text)


def _save(run: Saveable, checkpoints: Checkpoints, step: int, state: TrainState) -> str:
    """Saves; returns the result as the end of a sentence, or "" if the state is that of a failed step."""
    try:
        jax.block_until_ready(state)
        bad = run.program.non_finite_leaf(state)
        if bad is not None:
            return f"is not saved: '{bad}' is not finite"
        run.reporter.trackers.flush()
        checkpoints.finish_save()  # an earlier failed save does not prevent this one
        if run.saves is not None:
            run.saves.tried_at = time.monotonic()
        checkpoints.save(step, state, run.record(step))
        ended = checkpoints.finish_save()
        return f"could not be saved: {ended.why}" if ended.why else "is saved"
    except Exception as error:  # noqa: BLE001  a further error; the first one is reported
        return (
            ""
            if describe_callback(error) or describe_out_of_memory(error)
            else f"could not be saved ({type(error).__name__}: {error})"
        )
