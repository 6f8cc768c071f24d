"""The task file: missing, broken, without the name, of the wrong kind."""

import pytest

from tests.support.command_line import Case

CASES = {
    "file missing": Case(("taks.py does not exist. Paths are relative to the config's folder. Did you mean 'task.py'?",), config={"task": "taks.py:task"}),
    "name missing": Case(("task.py has no 'taks'. Did you mean 'task'? It defines: task.",), config={"task": "task.py:taks"}),
    "module missing": Case(("task: module 'no_such_package.model' was not found. It must be importable, or a path that ends in .py. Try no_such_package/model.py:NAME.",), config={"task": "no_such_package.model:task"}),
    "module inside a package missing": Case(("task: module 'json.model' was not found. It must be importable, or a path that ends in .py. Try json/model.py:NAME.",), config={"task": "json.model:task"}),
    "module that imports what is missing": Case(("task: importing", "No module named 'no_such_package'. It must run to its end. Mend that line."), "import no_such_package"),
    "raises at import": Case(("task: importing", "division by zero. It must run to its end. Mend that line."), "1 / 0"),
    "raises at import with a long text": Case(("task: importing", ".... It must run to its end. Mend that line."), "raise ValueError('x' * 5000)"),
    "exits at import": Case(("task: importing", "3. It must run to its end. Mend that line."), "import sys; sys.exit(3)"),
    "asks for input at import": Case(("task: importing", "usage: task.py FILE. It must run to its end. Mend that line."), "raise SystemExit('usage: task.py FILE')"),
    "syntax error": Case(("task: importing", "invalid syntax. It must run to its end. Mend that line."), "def broken(:\n    pass"),
    "a name that is no task": Case(("task.py:DATA is dict. A config names what its module declares: a spmdkit.Task or a function under @sk.task. Name one, such as task.",), config={"task": "task.py:DATA"}),
    "a class that is no task": Case(("task.py:Model(...) returned Model. It must return a spmdkit.Task.",), "@sk.task\nclass Model: pass", config={"task": "task.py:Model"}),
    "a function that returns no task": Case(("task.py:make(...) returned dict. It must return a spmdkit.Task.",), "@sk.task\ndef make(): return {'init': init}", config={"task": "task.py:make"}),
    "a function of the wrong kind": Case(("task.py:loss_fn is a function of task. A config names what its module declares: a spmdkit.Task or a function under @sk.task.", "Write @sk.task above its definition."), config={"task": "task.py:loss_fn"}),
    "a function that raises": Case(("task.py:make(...) raised OSError at", "no data in /nowhere. It must run to its end. Mend that line."), "@sk.task\ndef make(width=4):\n    raise OSError('no data in /nowhere')", config={"task": "task.py:make"}),
    "task_args unknown": Case(("task_args {'widht': 8} do not fit", "keyword argument 'widht'. They are its keyword arguments. Did you mean 'width'?"), "@sk.task\ndef make(width=4): return task", config={"task": "task.py:make", "task_args": "{widht: 8}"}),
    "task_args missing": Case(("task_args {} do not fit", "They are its keyword arguments. Give task_args: {width: ...}."), "@sk.task\ndef make(width): return task", config={"task": "task.py:make"}),
    "task_args on a plain task": Case(("task_args ['width'] have no effect:", "that returns one. Write `def task(width): return Task(...)` under @sk.task, or remove task_args."), config={"task_args": "{width: 8}"}),
    "a function of Python": Case(("task: os:system is a function of", ". A config names what its module declares: a spmdkit.Task or a function under @sk.task. Write one, in a file of yours: my_task.py:task."), config={"task": "os:system", "task_args": "{command: touch proof}"}),
    "a function of another module": Case(("task.py:made is a function of elsewhere declared in elsewhere with @sk.task.", "Name it where it is declared: elsewhere:made."), "import sys, types\nsys.modules['elsewhere'] = elsewhere = types.ModuleType('elsewhere')\nexec('import spmdkit as sk\\n@sk.task\\ndef made(): pass', vars(elsewhere))\nfrom elsewhere import made", config={"task": "task.py:made"}),
    "a hook as a task": Case(("task.py:made is a function of task declared in", "with @sk.hook. A config names", "Write @sk.task above its definition."), "@sk.hook\ndef made(): pass", config={"task": "task.py:made"}),
    "a decorator around a task": Case(("@sk.task is given Task. It declares a function of yours. Write it above `def make(...):`.",), "made = sk.task(sk.Task(init, loss_fn))"),
    "an unknown argument of Task": Case(("task: importing", "got an unexpected keyword argument 'loss'. It must run to its end. Mend that line."), task={"loss": "loss_fn"}),
    "neither loss_fn nor train_step": Case(("Task has neither loss_fn nor train_step. One of them says what is trained. Give loss_fn.",), task={"loss_fn": None}),
    "no init": Case(("task: importing", "missing 1 required positional argument: 'init'. It must run to its end. Mend that line."), task={"init": None}),
    "init called instead of passed": Case(("Task.init is dict. It must be a function. Pass the function itself.",), task={"init": "init(jax.random.key(0))"}),
    "an unknown view": Case(("Task.view is 'replicas'. Valid: 'global', 'replica'.",), task={"view": "'replicas'"}),
    "a view without a train_step": Case(("Task.view is 'replica', but there is no train_step. The view is the dialect of train_step.",), task={"view": "'replica'"}),
    "no optimizer": Case(("run.yaml: optimizer: is null, and the task has no optimizer. Training needs one. Try optimizer: {name: adamw, learning_rate: 1e-3}.",), task={"optimizer": None}),
    "an optimizer that is none": Case(("Task.optimizer needs an optax optimizer or a function of the learning rate, found 0.1 (a number). Try Task(optimizer=optax.adamw(1e-3)).",), task={"optimizer": "0.1"}),
    "an optimizer of another library": Case(("Task.optimizer needs an optax optimizer or a function of the learning rate, found a Python Adam. Try Task(optimizer=optax.adamw(1e-3)).",), "class Adam:\n    def step(self): pass", task={"optimizer": "Adam()"}),
    "an optimizer that wants a rate": Case(("run.yaml: learning_rate: is null, and the task's optimizer is a function of it. Try learning_rate: 1e-3.",), task={"optimizer": "optax.sgd"}),
    "a rate that the optimizer cannot take": Case(("run.yaml:8: learning_rate: is given, and the task's optimizer is complete, so it has no effect.", "it, or give the task a function of it: Task(optimizer=lambda rate: optax.adamw(rate))."), config={"learning_rate": "1e-3"}),
    "no train_data": Case(("Task.train_data is missing. It is what train reads. Give a mapping of arrays, a source or a grain dataset.",), task={"train_data": None}),
    "evaluation without eval_data": Case(("eval.every_steps has no effect: the task has no eval_data. Remove it, or give Task(eval_data=...).",), config={"eval": "{every_steps: 2}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_task_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)
