"""What is saved when a task's own code ends a run: the state of the last good step, within `checkpoint.on_error_s`.

The state is there as long as the step after it has not been started: the data of the next batch raised, or a hook. What
raises inside a step (`jax.debug.callback`) takes the state with it, since a step is given its memory. Several processes
save together or not at all: they stop before the same step, and each hears why (step_barrier.py).
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


def keep_work(run: Run, state: TrainState, error: BaseException) -> None:
    """Saves `state`, that of `run.step`, before `error` ends the run, and says so. Never raises, and never takes longer
    than asked."""
    options = run.config.checkpoint
    if options is None or run.checkpoints is None or options.on_error_s is None or isinstance(error, NOTHING_TO_KEEP):
        return
    step, several = run.step, run.cluster.num_processes > 1
    if (
        (
            step == run.saved_at_step and not several
        )  # which waits at its end for what is being written; one of several does not
        or (several and not run.together.ended)
        or any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    ):
        return
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(_save(run, step, state)), name="keep-work", daemon=True)
    with phase.during("save"):
        thread.start()
        thread.join(options.on_error_s)
    if thread.is_alive():
        run.left_saving = True
        said.append(f"was not saved within {options.on_error_s:g} s (checkpoint.on_error_s)")
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
            run.events_of(run.checkpoints.commits())
            return "is saved"
        # A save that failed before is no reason to lose this one.
        run.checkpoints.save(step, state, run.record(step))
        ended = run.checkpoints.settle()
        run.events_of(run.checkpoints.commits())
        if ended.why:
            return f"could not be saved: {ended.why}"
    except Exception as error:  # noqa: BLE001  what ends the run is another error, which must be told
        # A step that a callback has ended is met here again: it is no good one.
        return "" if of_callback(error) else f"could not be saved ({type(error).__name__}: {error})"
    run.saved_at_step = step
    return "is saved"
