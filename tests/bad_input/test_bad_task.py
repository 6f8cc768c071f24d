"""The task file: missing, broken, without the name, of the wrong kind."""

import pytest

from tests.support.command_line import Case
from tests.support.messages import Says

CASES = {
    "file missing": Case(Says(asked="taks.py", found="does not exist", rule="config's folder", repair="'task.py'"), config={"task": "taks.py:task"}),
    "name missing": Case(Says(asked="task.py has no 'taks'", found="defines: task", repair="'task'?"), config={"task": "task.py:taks"}),
    "module missing": Case(Says(asked="module 'no_such_package.model'", found="was not found", rule=("importable", ".py"), repair="no_such_package/model.py:NAME"), config={"task": "no_such_package.model:task"}),
    "module inside a package missing": Case(Says(asked="module 'json.model'", found="was not found", rule=("importable", ".py"), repair="json/model.py:NAME"), config={"task": "json.model:task"}),
    "module that imports what is missing": Case(Says(asked="task: importing", found="No module named 'no_such_package'", rule="run to its end", repair="Fix that line"), "import no_such_package"),
    "raises at import": Case(Says(asked="task: importing", found="division by zero", rule="run to its end", repair="Fix that line"), "1 / 0"),
    "raises at import with a long text": Case(Says(asked="task: importing", found="xxx ....", rule="run to its end", repair="Fix that line"), "raise ValueError('x' * 5000)"),
    "exits at import": Case(Says(asked="task: importing", found=": 3.", rule="run to its end", repair="Fix that line"), "import sys; sys.exit(3)", exit=70),
    "asks for input at import": Case(Says(asked="task: importing", found="usage: task.py FILE", rule="run to its end", repair="Fix that line"), "raise SystemExit('usage: task.py FILE')", exit=70),
    "syntax error": Case(Says(asked="task: importing", found="invalid syntax", rule="run to its end", repair="Fix that line"), "def broken(:\n    pass"),
    "a name that is no task": Case(Says(asked="task.py:DATA", found="is dict", rule=("registers", "a spmdkit.Task", "@sk.task"), repair="such as task"), config={"task": "task.py:DATA"}),
    "a class that is no task": Case(Says(asked="task.py:Model(...)", found="returned Model", rule="a spmdkit.Task"), "@sk.task\nclass Model: pass", config={"task": "task.py:Model"}),
    "a function that returns no task": Case(Says(asked="task.py:make(...)", found="returned dict", rule="a spmdkit.Task"), "@sk.task\ndef make(): return {'init': init}", config={"task": "task.py:make"}),
    "a function of the wrong kind": Case(Says(asked="task.py:loss_fn", found="a function of task", rule=("registers", "a spmdkit.Task"), repair="@sk.task above its definition"), config={"task": "task.py:loss_fn"}),
    "a function that raises": Case(Says(asked="task.py:make(...) raised OSError at", found="no data in /nowhere", rule="run to its end", repair="Fix that line"), "@sk.task\ndef make(width=4):\n    raise OSError('no data in /nowhere')", config={"task": "task.py:make"}),
    "task_args unknown": Case(Says(asked="task_args {'widht': 8}", found="keyword argument 'widht'", rule="its keyword arguments", repair="'width'"), "@sk.task\ndef make(width=4): return task", config={"task": "task.py:make", "task_args": "{widht: 8}"}),
    "task_args missing": Case(Says(asked="task_args {}", found="do not fit", rule="its keyword arguments", repair="task_args: {width: ...}"), "@sk.task\ndef make(width): return task", config={"task": "task.py:make"}),
    "task_args on a plain task": Case(Says(asked="task_args ['width']", found="no effect", repair=("def task(width): return Task(...)", "@sk.task", "remove task_args")), config={"task_args": "{width: 8}"}),
    "a function of Python": Case(Says(asked="task: os:system", found="a function of", rule=("registers", "a spmdkit.Task", "@sk.task"), repair="my_task.py:task"), config={"task": "os:system", "task_args": "{command: touch proof}"}),
    "a function of another module": Case(Says(asked="task.py:made", found=("a function of elsewhere", "registered in elsewhere"), rule="where it is registered", repair="elsewhere:made"), "import sys, types\nsys.modules['elsewhere'] = elsewhere = types.ModuleType('elsewhere')\nexec('import spmdkit as sk\\n@sk.task\\ndef made(): pass', vars(elsewhere))\nfrom elsewhere import made", config={"task": "task.py:made"}),
    "a hook as a task": Case(Says(asked="task.py:made", found=("registered in", "with @sk.hook"), rule="A config names", repair="@sk.task above its definition"), "@sk.hook\ndef made(): pass", config={"task": "task.py:made"}),
    "a decorator around a task": Case(Says(asked="@sk.task", found="received Task", rule="a function", repair="above `def make(...):`"), "made = sk.task(sk.Task(init, loss_fn))"),
    "an unknown argument of Task": Case(Says(asked="task: importing", found="got an unexpected keyword argument 'loss'", rule="run to its end", repair="Fix that line"), task={"loss": "loss_fn"}),
    "neither loss_fn nor train_step": Case(Says(asked="Task", found="neither loss_fn nor train_step", repair="Pass loss_fn"), task={"loss_fn": None}),
    "no init": Case(Says(asked="task: importing", found="missing 1 required positional argument: 'init'", rule="run to its end", repair="Fix that line"), task={"init": None}),
    "init called instead of passed": Case(Says(asked="Task.init", found="is dict", rule="a function", repair="Pass the function"), task={"init": "init(jax.random.key(0))"}),
    "an unknown view": Case(Says(asked="Task.view", found="'replicas'", repair="'global', 'replica'"), task={"view": "'replicas'"}),
    "a view without a train_step": Case(Says(asked="Task.view is 'replica'", found="no train_step"), task={"view": "'replica'"}),
    "no optimizer": Case(Says(asked="run.yaml: optimizer: is null", found="no optimizer", rule="Training needs one", repair="optimizer: {name: adamw, learning_rate: 1e-3}"), task={"optimizer": None}),
    "an optimizer that is none": Case(Says(asked="Task.optimizer", found="found 0.1 (a number)", rule=("an optax optimizer", "a function of the learning rate"), repair="Task(optimizer=optax.adamw(1e-3))"), task={"optimizer": "0.1"}),
    "an optimizer of another library": Case(Says(asked="Task.optimizer", found="found a Python Adam", rule=("an optax optimizer", "a function of the learning rate"), repair="Task(optimizer=optax.adamw(1e-3))"), "class Adam:\n    def step(self): pass", task={"optimizer": "Adam()"}),
    "an optimizer that wants a rate": Case(Says(asked="run.yaml: learning_rate: is null", found="a function of it", repair="learning_rate: 1e-3"), task={"optimizer": "optax.sgd"}),
    "a rate that the optimizer cannot take": Case(Says(asked="run.yaml:8: learning_rate: is given", found="optimizer is complete", rule="no effect", repair="Task(optimizer=lambda rate: optax.adamw(rate))"), config={"learning_rate": "1e-3"}),
    "no train_data": Case(Says(asked="Task.train_data", found="is missing", repair=("arrays", "grain dataset")), task={"train_data": None}),
    "evaluation without eval_data": Case(Says(asked="eval.every_steps", found=("no effect", "no eval_data"), repair="Task(eval_data=...)"), config={"eval": "{every_steps: 2}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_task_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)
