"""The task file: missing, broken, without the name, of the wrong kind."""

import pytest
from command_line import Case

CASES = {
    "file missing": Case((), config={"task": "taks.py:task"}),
    "name missing": Case((), config={"task": "task.py:taks"}),
    "module missing": Case((), config={"task": "no_such_package.model:task"}),
    "module inside a package missing": Case((), config={"task": "json.model:task"}),
    "module that imports what is missing": Case((), "import no_such_package"),
    "raises at import": Case((), "1 / 0"),
    "raises at import with a long text": Case((), "raise ValueError('x' * 5000)"),
    "exits at import": Case((), "import sys; sys.exit(3)"),
    "asks for input at import": Case((), "raise SystemExit('usage: task.py FILE')"),
    "syntax error": Case((), "def broken(:\n    pass"),
    "a name that is no task": Case((), config={"task": "task.py:DATA"}),
    "a class that is no task": Case((), "class Model: pass", config={"task": "task.py:Model"}),
    "a function that returns no task": Case((), "def make(): return {'init': init}", config={"task": "task.py:make"}),
    "a function of the wrong kind": Case((), config={"task": "task.py:loss_fn"}),
    "a function that raises": Case((), "def make(width=4):\n    raise OSError('no data in /nowhere')", config={"task": "task.py:make"}),
    "task_args unknown": Case((), "def make(width=4): return task", config={"task": "task.py:make", "task_args": "{widht: 8}"}),
    "task_args missing": Case((), "def make(width): return task", config={"task": "task.py:make"}),
    "task_args on a plain task": Case((), config={"task_args": "{width: 8}"}),
    "an unknown argument of Task": Case((), task={"loss": "loss_fn"}),
    "neither loss_fn nor train_step": Case((), task={"loss_fn": None}),
    "no init": Case((), task={"init": None}),
    "init called instead of passed": Case((), task={"init": "init(jax.random.key(0))"}),
    "an unknown view": Case((), task={"view": "'replicas'"}),
    "a view without a train_step": Case((), task={"view": "'replica'"}),
    "no optimizer": Case((), task={"optimizer": None}),
    "an optimizer that is none": Case((), task={"optimizer": "0.1"}),
    "an optimizer of another library": Case((), "class Adam:\n    def step(self): pass", task={"optimizer": "Adam()"}),
    "an optimizer that wants a rate": Case((), task={"optimizer": "optax.sgd"}),
    "a rate that the optimizer cannot take": Case((), config={"learning_rate": "1e-3"}),
    "no train_data": Case((), task={"train_data": None}),
    "evaluation without eval_data": Case((), config={"eval": "{every_steps: 2}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_task_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)
