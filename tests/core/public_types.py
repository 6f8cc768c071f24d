"""What the type checker of a user sees of the public names. `make types` checks this file, no test runs it."""

from collections.abc import Callable
from typing import Any, assert_type

import jax

import spmdkit as sk
from spmdkit.run.hooks.base import Action, Metrics, RunView
from spmdkit.run.result import Result


def own_loop() -> None:
    program = assert_type(sk.build("task.yaml"), sk.Program)
    state = assert_type(program.init(), sk.TrainState)
    for step, batch in program.batches():
        assert_type(step, int)
        assert_type(batch, sk.Batch)
        state, metrics = program.step(state, batch)
        assert_type(state, sk.TrainState)
        assert_type(metrics, dict[str, jax.Array])
    assert_type(state.step, jax.Array)
    assert_type(state.apply_gradients(state.params), sk.TrainState)
    assert_type(program.eval(state), dict[str, Any])
    assert_type(program.explain(), str)


@sk.hook
def patience(evaluations: int = 3) -> sk.Hook:
    seen = {"best": 1e9}

    def after_eval(run: RunView, step: int, values: Metrics) -> sk.Stop | None:
        assert_type(run.numbers(step, {}), Metrics)
        return sk.Stop() if step > evaluations else None

    hook = sk.Hook("patience", after_eval=after_eval, state=lambda: dict(seen), restore=seen.update)
    assert_type(hook.after_eval, Callable[[RunView, int, Metrics], Action | None] | None)
    return hook


def a_run() -> None:
    assert_type(patience(evaluations=2), sk.Hook)
    assert_type(sk.train("task.yaml"), Result)
