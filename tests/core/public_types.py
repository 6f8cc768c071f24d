"""What the type checker of a user sees of the public names. `make types` checks this file, no test runs it."""

from typing import Any, assert_type

import jax

import spmdkit as sk
from spmdkit.run.loop import Result


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
    return sk.Hook("patience", state=lambda: {"evaluations": evaluations})


def a_run() -> None:
    assert_type(patience(evaluations=2), sk.Hook)
    assert_type(sk.train("task.yaml"), Result)
