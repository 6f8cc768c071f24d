"""`explain` warns of every random program that `verify` reports as different on {data: 4}.

It warns of no program without a part that mixes rows. A layer norm after a scale of all rows leaves nothing of the
mixing, so `verify` reports some programs as equal that `explain` warns of.
"""

import jax
import optax
import pytest

import spmdkit as sk
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import Setting, TaskRunner
from tests.step.random_programs import with_state
from tests.step.row_programs import DATA, ROWS, init
from tests.support.forms import slow_except


@pytest.mark.parametrize("seed", slow_except([12, 33], range(100)))
def test_verify_and_explain_agree(seed):
    names, mixes, state, loss = with_state(seed)
    config = sk.Config(task="t.py:t", batch_size=ROWS, steps=2, data={"shuffle": False})
    task = sk.Task(lambda key: sk.Variables(init(key), state), loss, optax.sgd(0.1), train_data=DATA)
    with jax.numpy_dtype_promotion("standard"):
        runner = CaseRunner(TaskRunner(config, task, ROWS, 2))
        runner.reference(Setting({}, short=runner.task_runner.short))
        found = runner.case({"data": 4}, 1, whole=False)
        four = sk.Config(task="t.py:t", batch_size=ROWS, steps=2, mesh={"data": 4})
        notes = sk.build(four, task=task, devices=jax.devices()[:4]).notes
    reported = any("mixes rows" in note or "draws random numbers" in note for note in notes)
    assert reported == mixes and (found["passed"] or reported), (names, list(state), found)
