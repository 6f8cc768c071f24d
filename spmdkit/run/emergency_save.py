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
from spmdkit.run.run import Run
from spmdkit.step.state import TrainState

NOTHING_TO_KEEP = (CheckpointWriteError, HangError, NonFiniteError, Preempted, RendezvousError)


def save_before_exit(run: Run, state: TrainState, error: BaseException) -> None:
    """Saves `state`, that of `run.step`, before `error` ends the run, and says so. Never raises, and never takes longer
    than asked."""
    options = run.config.checkpoint
    if (
        options is None
        or run.checkpoints is None
        or options.emergency_timeout_s is None
        or isinstance(error, NOTHING_TO_KEEP)
    ):
        return
    step = run.step
    if run.cluster.num_processes > 1 or step == run.saved_at_step:
        return
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(_save(run, step, state)), name="keep-work", daemon=True)
    with phase.during("save"):
        thread.start()
        thread.join(options.emergency_timeout_s)
    if thread.is_alive():
        run.left_saving = True
        said.append(f"was not saved within {options.emergency_timeout_s:g} s (checkpoint.emergency_timeout_s)")
    if not said[0]:
        return
    text = f"step {step}, the last good one, {said[0]}"
    run.events.write("emergency_saved", step=step, why=text)
    run.message(text)


def _save(run: Run, step: int, state: TrainState) -> str:
    assert run.checkpoints is not None
    try:
        jax.block_until_ready(state)
        bad = run.program.non_finite_leaf(state)
        if bad is not None:
            return f"is not saved: '{bad}' is not finite"
        run.reporter.trackers.flush()
        before = run.checkpoints.settle()
        if run.saved_at_step == step and not before.why:
            run.events_of(run.checkpoints.new_commits())
            return "is saved"
        # A save that failed before is no reason to lose this one.
        run.checkpoints.save(step, state, run.record(step))
        ended = run.checkpoints.settle()
        run.events_of(run.checkpoints.new_commits())
        if ended.why:
            return f"could not be saved: {ended.why}"
    except Exception as error:  # noqa: BLE001  what ends the run is another error, which must be told
        # A step that a callback has ended is met here again: it is no good one.
        return "" if of_callback(error) else f"could not be saved ({type(error).__name__}: {error})"
    run.saved_at_step = step
    return "is saved"
