"""The actions that hooks request: evaluate, save, replace the state, roll back, stop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from spmdkit.data import DeviceBatches
from spmdkit.errors import ConfigError, NonFiniteError, SpmdkitError, UserCodeError
from spmdkit.foundation import phase
from spmdkit.foundation.trees import first_difference
from spmdkit.run.hooks.base import Decision, ReplaceState, Rollback, Stop
from spmdkit.run.recovery import rollback
from spmdkit.run.run import Run
from spmdkit.step.state import TrainState, check_not_donated


def perform(
    run: Run, step: int, state: TrainState, batches: DeviceBatches, decision: Decision
) -> tuple[TrainState, DeviceBatches, Stop | None]:
    """Performs the actions decided at `step`; returns (state, batches, the `Stop` that ends training or None)."""
    turn = decision.turn
    if isinstance(turn, Stop) and not turn.saves:
        if turn.save_first:
            save(run, step, state)
            turn = dataclasses.replace(turn, why=f"{turn.why} {run.newest_committed()}")
        raise _failure(turn)
    if isinstance(turn, Rollback):
        state, batches = go_back(run, turn, batches)
        return state, batches, None
    if isinstance(turn, ReplaceState):
        state = replaced(run, step, state, turn.state)
    if decision.evaluate:
        evaluate(run, step, state)
    more = run.hook_runner.more()  # requested in after_eval: save a best loss, stop early
    if isinstance(more.turn, Rollback) or (isinstance(more.turn, Stop) and not more.turn.saves):
        return perform(run, step, state, batches, more)
    if isinstance(more.turn, ReplaceState):
        state = replaced(run, step, state, more.turn.state)
    turn = next((t for t in (turn, more.turn) if isinstance(t, Stop)), None)
    if turn is not None and turn.code == 0:
        run.mark_finished(turn.why or "a hook")
    if decision.save or more.save or turn is not None:
        save(run, step, state)
    return state, batches, turn


def evaluate(run: Run, step: int, state: TrainState) -> None:
    """Evaluates the state of `step`, unless it is already evaluated or the task has no evaluation."""
    if not run.program.has_eval or (run.last_eval is not None and run.last_eval[0] == step):
        return
    jax.block_until_ready(state.step)
    with run.reporter.throughput.paused(), phase.during("evaluation"):
        values = run.program.evaluator(state)
    run.record_evaluation(step, values)
    run.hook_runner.call("after_eval", run, step, values)


def evaluate_if_missing(run: Run, state: TrainState) -> None:
    """Evaluates the last state of a run that an earlier start trained, if that evaluation failed.

    Raises:
        NonFiniteError, UserCodeError: it fails again, or a hook stops with an error.
    """
    if not run.program.has_eval or run.step != run.config.num_steps or run.is_evaluated(run.step):
        return
    run.message(f"the evaluation of step {run.step} is missing: evaluating")
    evaluate(run, run.step, state)
    turn = run.hook_runner.more().turn
    if isinstance(turn, Stop) and not turn.saves:
        raise _failure(turn)


def save(run: Run, step: int, state: TrainState) -> None:
    """Saves the state of `step`, unless it is already saved. Returns once the arrays are copied; a thread writes them.

    Raises:
        NonFiniteError: the state is not finite.
        CheckpointWriteError: this or the previous save failed, `checkpoint.max_failures` times in a row.
    """
    if run.saves is None or run.has_saved(step):
        return
    jax.block_until_ready(state.step)
    with run.reporter.throughput.paused(), phase.during("save"):
        bad = run.program.non_finite_leaf(state)
        if bad is not None:
            if run.config.on_nonfinite.gradient == "stop" or step == run.config.num_steps or run.finished is not None:
                # Only the process with the non-finite gradient knows the batch; `stop_reason` shares it.
                why = run.hook_runner.stop_reason()
                raise NonFiniteError(why or f"{_bad_state(run, step, bad)} {AFTER_BAD_STATE}")
            run.message(_bad_state(run, step, bad))
            return
        run.reporter.trackers.flush()
        evaluated, values = run.last_eval or (None, {})
        numbers = {name: x for name, x in values.items() if not np.ndim(x)} if evaluated == step else None
        started = run.saves.start(step, state, run.record(step), numbers)
    if started:
        run.hook_runner.call("after_save", run, step)


def _bad_state(run: Run, step: int, leaf: str) -> str:
    return f"the state is not finite at step {step}: '{leaf}'. It is not saved. {run.newest()}"


AFTER_BAD_STATE = "Lower the learning rate or set clip_norm, and start again from there."


def check_last(run: Run, state: TrainState) -> None:
    """Raises NonFiniteError if the last state is not finite, for each policy of `on_nonfinite`, also without saves. If
    the last update made it non-finite, no loss has been computed from it."""
    if run.saved_step == run.step:
        return  # `save` has checked it
    with phase.during("save"):
        bad = run.program.non_finite_leaf(state)
    if bad is not None:
        raise NonFiniteError(f"{_bad_state(run, run.step, bad)} {AFTER_BAD_STATE}")


def replaced(run: Run, step: int, state: TrainState, new: Any) -> TrainState:
    """Returns the state that a hook requested, in the layout of the program. Raises ConfigError if its leaves, shapes
    or dtypes differ, or if it was donated."""
    if not isinstance(new, TrainState) or (difference := first_difference(state, new)):
        found = difference if isinstance(new, TrainState) else f"it is {type(new).__name__}"
        raise ConfigError(
            f"sk.ReplaceState at step {step}: the new state differs in shape: {found}. Shapes and dtypes of the state "
            "are the same for all steps. Write sk.ReplaceState(state.replace(params=...))."
        )
    check_not_donated(new, f"sk.ReplaceState at step {step}")
    run.forget_evaluation()
    placed: TrainState = jax.device_put(new, run.program.state_sharding)
    return placed


def go_back(run: Run, rollback_to: Rollback, batches: DeviceBatches) -> tuple[TrainState, DeviceBatches]:
    """Returns the state of an earlier step and the batches that follow it. Raises UserCodeError if the same rollback
    was done before without skipped batches: it would repeat indefinitely."""
    batches.close()
    from_step, skipped_before = run.step, run.program.schedule.skipped
    with phase.during("restore"):
        state = rollback.go_back(run, rollback_to.to_step, rollback_to.skip_batches, rollback_to.batches)
    if not run.is_new_rollback(from_step, skipped_before) and not rollback_to.skip_batches and not rollback_to.batches:
        raise UserCodeError(
            f"a hook rolls back from step {from_step} to step {run.step} for the second time without a change: the "
            "same batches give the same result. Skip batches, as in sk.Rollback(skip_batches=10), or stop."
        )
    return state, run.read_batches()


def _failure(stop: Stop) -> SpmdkitError:
    kinds = {kind.exit_code: kind for kind in reversed(SpmdkitError.__subclasses__())}
    return kinds.get(stop.code, UserCodeError)(stop.why or f"a hook stopped training with code {stop.code}")
