"""Emergency save: a run of one process saves the state of its last complete step when the data or a hook raises, within
`checkpoint.emergency_timeout_s` seconds.

The state exists until the next step starts. An error inside a step (`jax.debug.callback`) loses it, because the step
takes the memory of its input state. A run of several processes saves nothing: the others are inside the next step. It
exits, and a restart resumes from the newest checkpoint or peer snapshot.
"""

from __future__ import annotations

import threading

import jax

from spmdkit.errors import CheckpointWriteError, HangError, NonFiniteError, Preempted, RendezvousError
from spmdkit.faults.error_mapping import of_callback
from spmdkit.foundation import phase
from spmdkit.run.recovery.save_retries import write_saved
from spmdkit.run.run import Run
from spmdkit.step.state import TrainState

NOT_SAVED = (CheckpointWriteError, HangError, NonFiniteError, Preempted, RendezvousError)
"""Errors after which there is no state to save, or no way to save it."""


def save_before_exit(run: Run, state: TrainState, error: BaseException) -> None:
    """Saves `state`, that of `run.step`, before `error` ends the run, and logs the result. Never raises, and never
    takes longer than `checkpoint.emergency_timeout_s`."""
    options, step = run.config.checkpoint, run.step
    if options is None or options.emergency_timeout_s is None or isinstance(error, NOT_SAVED):
        return
    if run.cluster.num_processes > 1 or step == run.saved_at_step:
        return
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return
    results: list[str] = []
    save = lambda: results.append(_save(run, step, state))
    thread = threading.Thread(target=save, name="spmdkit-emergency-save", daemon=True)
    with phase.during("save"):
        thread.start()
        thread.join(options.emergency_timeout_s)
    if thread.is_alive():
        run.mark_save_abandoned()
        results.append(f"was not saved within {options.emergency_timeout_s:g} s (checkpoint.emergency_timeout_s)")
    if not results[0]:
        return
    text = f"step {step}, the last good one, {results[0]}"
    run.events.write("emergency_saved", step=step, why=text)
    run.message(text)


def _save(run: Run, step: int, state: TrainState) -> str:
    """Returns the result as the end of a sentence; empty if the state is that of a failed step."""
    assert run.checkpoints is not None
    try:
        jax.block_until_ready(state)
        bad = run.program.non_finite_leaf(state)
        if bad is not None:
            return f"is not saved: '{bad}' is not finite"
        run.reporter.trackers.flush()
        run.checkpoints.settle()  # an earlier failed save does not prevent this one
        run.checkpoints.save(step, state, run.record(step))
        ended = run.checkpoints.settle()
        write_saved(run.events, run.checkpoints.new_commits())
        if ended.why:
            return f"could not be saved: {ended.why}"
    except Exception as error:  # noqa: BLE001  another error ends the run, and that one is reported
        return "" if of_callback(error) else f"could not be saved ({type(error).__name__}: {error})"
    run.mark_saved(step)
    return "is saved"
