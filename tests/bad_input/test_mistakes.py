"""Mistakes in the config, the task, its data and its functions: each is reported, the run keeps what it has, and the
run starts after the smallest repair."""

import pytest

from tests.bad_input.repairs import REPAIRS
from tests.support.command_line import Case
from tests.support.messages import Parts

CONFIG = {
    "unknown key": Case(Parts(requested="run.yaml:8: stepps:", found="unknown key", repair="'steps'"), config={"stepps": "3"}),
    "two problems at once": Case(Parts(requested=("run.yaml:8: seed:", "run.yaml:9: stepps:"), found=("found 'x' (text)", "unknown key"), rule="integer", repair=("Try seed: 0", "'steps'")), config={"seed": "x", "stepps": "3"}),
    "an override with a typo": Case(Parts(requested="override chekpoint.keep=2: chekpoint:", found="unknown key", repair="'checkpoint'"), overrides=("chekpoint.keep=2",)),
    "more devices than there are": Case(Parts(requested=("devices: cpu:16", "16 in process 0"), found="found 8 cpu", rule="creates its devices once", repair="at most 8"), config={"devices": "cpu:16"}),
    "a device index out of range": Case(Parts(requested="devices: [0, 99]", found=("99", "found 8 cpu"), rule="from 0", repair=("up to 7", "devices: auto")), config={"devices": "[0, 99]", "mesh": "{data: 2}"}),
    "mesh too small": Case(Parts(requested="mesh needs data(2) = 2 devices", found="found 4", rule="equal the device count", repair="data: 4, or data: -1"), config={"mesh": "{data: 2}"}),
    "batch that a filled mesh does not cut": Case(Parts(requested=("run.yaml:4: batch_size:", "is 6", "data(2) x fsdp(2) = 4"), found="a remainder of 2", rule="a multiple of 4", repair="batch_size: 4 or 8"), config={"batch_size": "6", "mesh": "{data: 2, fsdp: -1}"}),
    "a rule that matches nothing": Case(Parts(requested="layout.rules: pattern 'ww'", found="none of the 2 parameters", rule="whole path", repair="'w'"), config={"mesh": "{fsdp: 4}", "layout": "{rules: [[ww, [embed, null]]]}"}),
    "a rule of the task without dims": Case(Parts(requested="Task.rules", found="'w'", rule="a pair (path pattern", repair="('blocks/.*/kernel', ('embed', 'mlp'))"), task={"rules": "['w']"}),
    "model state policy without model state": Case(Parts(requested="model_state: replica", found="no effect", rule="init returns no state", repair="sk.Variables(params, state)"), config={"model_state": "replica"}),
    "a number in quotes": Case(Parts(requested="run.yaml:3: steps:", found="found '4' (text)", rule="a valid integer", repair="Write steps: 4, without quotes"), config={"steps": "'4'"}),
    "no steps": Case(Parts(requested="run.yaml:3: steps:", found="found 0 (a whole number)", rule="greater than or equal to 1", repair="Try steps: 1"), config={"steps": "0"}),
    "a mesh axis with a typo": Case(Parts(requested="run.yaml:6: mesh.dtaa:", found="unknown key", repair="'data'"), config={"mesh": "{dtaa: -1}"}),
    "two axes that fill": Case(Parts(requested="run.yaml:6: mesh.fsdp:", found="is -1, and so is mesh.data", rule="At most one", repair="Give one a number"), config={"mesh": "{data: -1, fsdp: -1}"}),
    "an accelerator by its name": Case(Parts(requested="run.yaml:5: devices:", found="found 'gpu:2' (text)", rule="local device indices", repair="Try devices: [0, 1]"), config={"devices": "gpu:2"}),
    "a section without a value": Case(Parts(requested="run.yaml:7:", found="checkpoint has no value", repair="null, or remove the key"), config={"checkpoint": ""}),
    "a key twice": Case(Parts(requested="run.yaml:9:", found="steps is given twice", rule="first on line 3", repair="Keep one of them"), config={"seed": "0\nsteps: 4"}),
    "an unknown optimizer": Case(Parts(requested="run.yaml:8: optimizer", found="'adamm'", repair="'adam'"), task={"optimizer": None}, config={"optimizer": "{name: adamm, learning_rate: 1e-3}"}),
    "an unknown reducer": Case(Parts(requested="run.yaml:8: reducer:", found="found 'sums' (text)", rule="one of", repair="'sum'"), config={"reducer": "sums"}),
    "a base that is not there": Case(Parts(requested="run.yaml:8: base:", found=("bsae.yaml", "no such file"), rule="A config is", repair="Correct the path"), config={"base": "bsae.yaml"}),
    "an unset environment variable": Case(Parts(requested="run.yaml:8: seed:", found="SPMDKIT_NO_SUCH", repair="${env:SPMDKIT_NO_SUCH:"), config={"seed": "${env:SPMDKIT_NO_SUCH}"}),
    "a variable of a shell": Case(Parts(requested="run.yaml:2: run_dir:", found="${RUNS}", rule="${env:", repair="${env:RUNS}"), config={"run_dir": "${RUNS}"}),
}  # fmt: skip

DATA = {
    "unequal lengths": Case(Parts(requested="train_data", found=("32 examples in leaf 'x' float32[32,4]", "31 in leaf 'y' float32[31,8]"), rule="count the same examples", repair="[:31]"), task={"train_data": "{'x': DATA['x'], 'y': DATA['y'][:31]}"}),
    "fewer examples than a batch": Case(Parts(requested="batch_size is 64", found="32 examples", rule="full batches only", repair=("at most 32", "data.drop_remainder: false")), config={"batch_size": "64"}),
    "a source that raises at one item": Case(Parts(requested=("batch of step 5", "train_data[5]"), found="OSError: item 5 is gone", rule="Every index"), "class Broken(Examples):\n    def __getitem__(self, i):\n        if i == 5: raise OSError('item 5 is gone')\n        return super().__getitem__(i)", {"train_data": "Broken()"}, {"steps": "8", "batch_size": "8"}, exit=70, may_train=True),
    "an odd first example": Case(Parts(requested=("train_data[1] leaf 'x' is float32[4]",), found=("float32[3]", "example 0"), rule="a compiled step has one", repair=("Pad or crop", "__getitem__")), "class Uneven(Examples):\n    def __getitem__(self, i): return {'x': DATA['x'][i][: 3 if i == 0 else 4], 'y': DATA['y'][i]}", {"train_data": "Uneven()"}),
    "a source of uneven examples": Case(Parts(requested=("batch of step 3", "train_data[29] leaf 'y'"), found=("float32[7]", "example 0"), rule="a compiled step has one", repair=("Pad or crop", "__getitem__")), "class Uneven(Examples):\n    def __getitem__(self, i): return {'x': DATA['x'][i], 'y': DATA['y'][i][: 8 - i % 2]}", {"train_data": "Uneven()"}, may_train=True),
    "a source whose length raises": Case(Parts(requested="len(train_data)", found="OSError: no index", rule="number of examples"), "class Broken(Examples):\n    def __len__(self): raise OSError('no index')", {"train_data": "Broken()"}, exit=70),
    "eval_data of float64": Case(Parts(requested="eval_data: leaf 'x'", found="float64", rule="float32", repair=".astype(np.float32)"), task={"eval_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "a generator": Case(Parts(requested="train_data is a generator", rule="__len__ and __getitem__", repair="list(data)"), task={"train_data": "(e for e in Examples())"}),
    "a function that returns the data": Case(Parts(requested="train_data is a function", rule="arrays", repair="@sk.stream"), task={"train_data": "lambda: DATA"}),
    "a class in place of its instance": Case(Parts(requested="train_data is the class Examples", rule="an instance", repair="train_data=Examples()"), task={"train_data": "Examples"}),
    "no arrays": Case(Parts(requested="train_data is {}", rule="holds no array", repair="at least one array"), task={"train_data": "{}"}),
    "no examples": Case(Parts(requested="train_data is empty", found="0 examples", rule="at least 1", repair="Check the filter"), task={"train_data": "{'x': DATA['x'][:0], 'y': DATA['y'][:0]}"}),
    "train_data of float64": Case(Parts(requested="train_data: leaf 'x'", found="float64", rule="float32", repair=".astype(np.float32)"), task={"train_data": "{'x': DATA['x'].astype(np.float64), 'y': DATA['y']}"}),
    "a column of text": Case(Parts(requested="train_data: leaf 'name'", found="<U1", rule="numbers or booleans", repair="remove it"), task={"train_data": "DATA | {'name': np.array(['a'] * 32)}"}),
    "a list of rows as a leaf": Case(Parts(requested="train_data: leaf 'x/0/0'", found="is a float", rule="numpy or JAX array", repair="np.asarray(...)"), task={"train_data": "{'x': DATA['x'].tolist(), 'y': DATA['y']}"}),
    "a masked array": Case(Parts(requested="train_data: leaf 'x'", found="masked array", rule="drop its mask", repair=".filled(value)"), task={"train_data": "{'x': np.ma.array(DATA['x']), 'y': DATA['y']}"}),
    "a scalar as a leaf": Case(Parts(requested="train_data: leaf 'scale'", found="scalar float32[]", rule="first dim of every leaf", repair="np.full(num_examples, value)"), task={"train_data": "DATA | {'scale': np.asarray(2, np.float32)}"}),
    "keys of two types": Case(Parts(requested="train_data is not a pytree", repair="keys of one type"), task={"train_data": "DATA | {1: DATA['x']}"}),
    "an example that is a list": Case(Parts(requested="train_data[0]", found="a Python list of 4 numbers", rule="an array or one number", repair="np.asarray(values"), "class Lists(Examples):\n    def __getitem__(self, i): return {'x': DATA['x'][i].tolist(), 'y': DATA['y'][i]}", {"train_data": "Lists()"}),
    "an example that is missing": Case(Parts(requested="train_data[0]", found="None", repair="Filter beforehand"), task={"train_data": "[None if i == 0 else e for i, e in enumerate(Examples())]"}),
    "a grain dataset of batches": Case(Parts(requested="train_data is a grain dataset of batches", found=".batch(8)", rule="batch_size in the config", repair="Remove .batch(8)"), "import grain", {"train_data": "grain.MapDataset.source(Examples()).batch(8)"}),
    "a grain dataset that repeats": Case(Parts(requested="train_data is endless", rule="counts the epochs", repair="Remove .repeat()"), "import grain", {"train_data": "grain.MapDataset.source(Examples()).repeat()"}),
}  # fmt: skip

TASK = {
    "file missing": Case(Parts(requested="taks.py", found="does not exist", rule="config's folder", repair="'task.py'"), config={"task": "taks.py:task"}),
    "name missing": Case(Parts(requested="task.py has no 'taks'", found="defines: task", repair="'task'?"), config={"task": "task.py:taks"}),
    "module missing": Case(Parts(requested="module 'no_such_package.model'", found="was not found", rule=("importable", ".py"), repair="no_such_package/model.py:NAME"), config={"task": "no_such_package.model:task"}),
    "raises at import": Case(Parts(requested="task: importing", found="division by zero", rule="run without an error", repair="Fix that line"), "1 / 0"),
    "exits at import": Case(Parts(requested="task: importing", found=": 3.", rule="run without an error", repair="Fix that line"), "import sys; sys.exit(3)", exit=70),
    "syntax error": Case(Parts(requested="task: importing", found="invalid syntax", rule="run without an error", repair="Fix that line"), "def broken(:\n    pass"),
    "a name that is no task": Case(Parts(requested="task.py:DATA", found="is dict", rule=("registers", "an spmdkit.Task", "@sk.task"), repair="such as task"), config={"task": "task.py:DATA"}),
    "a class that is no task": Case(Parts(requested="task.py:Model(...)", found="returned Model", rule="an spmdkit.Task"), "@sk.task\nclass Model: pass", config={"task": "task.py:Model"}),
    "a function that returns no task": Case(Parts(requested="task.py:make(...)", found="returned dict", rule="an spmdkit.Task"), "@sk.task\ndef make(): return {'init': init}", config={"task": "task.py:make"}),
    "a function of the wrong kind": Case(Parts(requested="task.py:loss_fn", found="a function of task", rule=("registers", "an spmdkit.Task"), repair="@sk.task above its definition"), config={"task": "task.py:loss_fn"}),
    "a function that raises": Case(Parts(requested="task.py:make(...) raised OSError at", found="no data in /nowhere", rule="run without an error", repair="Fix that line"), "@sk.task\ndef make(width=4):\n    raise OSError('no data in /nowhere')", config={"task": "task.py:make"}),
    "task_args unknown": Case(Parts(requested="task_args {'widht': 8}", found="keyword argument 'widht'", rule="its keyword arguments", repair="'width'"), "@sk.task\ndef make(width=4): return task", config={"task": "task.py:make", "task_args": "{widht: 8}"}),
    "task_args missing": Case(Parts(requested="task_args {}", found="do not fit", rule="its keyword arguments", repair="task_args: {width: ...}"), "@sk.task\ndef make(width): return task", config={"task": "task.py:make"}),
    "task_args on a plain task": Case(Parts(requested="task_args ['width']", found="no effect", repair=("def task(width): return Task(...)", "@sk.task", "remove task_args")), config={"task_args": "{width: 8}"}),
    "an unknown argument of Task": Case(Parts(requested="task: importing", found="got an unexpected keyword argument 'loss'", rule="run without an error", repair="Fix that line"), task={"loss": "loss_fn"}),
    "neither loss_fn nor train_step": Case(Parts(requested="Task", found="neither loss_fn nor train_step", repair="Pass loss_fn"), task={"loss_fn": None}),
    "init called instead of passed": Case(Parts(requested="Task.init", found="is dict", rule="a function", repair="Pass the function"), task={"init": "init(jax.random.key(0))"}),
    "an unknown view": Case(Parts(requested="Task.view", found="'replicas'", repair="'global', 'replica'"), task={"view": "'replicas'"}),
    "a view without a train_step": Case(Parts(requested="Task.view is 'replica'", found="no train_step"), task={"view": "'replica'"}),
    "no optimizer": Case(Parts(requested="run.yaml: optimizer: is null", found="no optimizer", rule="Training needs one", repair="optimizer: {name: adamw, learning_rate: 1e-3}"), task={"optimizer": None}),
    "no train_data": Case(Parts(requested="Task.train_data", found="is missing", repair=("arrays", "grain dataset")), task={"train_data": None}),
    "evaluation without eval_data": Case(Parts(requested="eval.every_steps", found=("no effect", "no eval_data"), repair="Task(eval_data=...)"), config={"eval": "{every_steps: 2}"}),
}  # fmt: skip

STATEFUL = """
def init(key):
    return sk.Variables({"w": jnp.zeros((4, 8)), "b": jnp.zeros(8)}, {"count": jnp.zeros(())})
"""
STEP = {"loss_fn": None, "train_step": "train_step"}
REPLICA = {**STEP, "view": "'replica'"}
GRAD = """
def error(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)
"""

INIT = {
    "arity": Case(Parts(requested="called as init(key)", found="defined as init()", rule="1 positional", repair="def init(key)"), "def init(): return {'w': jnp.zeros(4)}"),
    "returns nothing": Case(Parts(requested="init", found="no arrays", rule="at least one array"), "def init(key): pass"),
    "returns text": Case(Parts(requested="at 'params/name'", found="init returned str", rule="leaf of the parameters is an array", repair="jnp.asarray"), "def init(key): return {'w': jnp.zeros((4, 8)), 'name': 'linear'}"),
    "returns integers": Case(Parts(requested="init returned parameter 'w'", found="as int32", rule="floating point", repair="sk.Variables(params, state)"), "def init(key): return {'w': jnp.zeros((4, 8), jnp.int32), 'b': jnp.zeros(8)}"),
    "shapes do not fit": Case(Parts(requested="init cannot be traced", found="JAX raised TypeError:", rule="fit together", repair="Fix that line"), "def init(key): return {'w': jnp.zeros((4, 8)) @ jnp.zeros((4, 8)), 'b': jnp.zeros(8)}"),
    "raises": Case(Parts(requested="init raised RuntimeError at", found="RuntimeError: no weights"), "def init(key): raise RuntimeError('no weights')", exit=70),
    "reads a value": Case(Parts(requested="init cannot be traced", found="TracerBoolConversionError", rule="no values", repair=("jnp.where", "jax.lax.cond", "jnp for np")), "def init(key):\n    w = jax.random.normal(key, (4, 8))\n    return {'w': w if w.sum() > 0 else -w, 'b': jnp.zeros(8)}"),
}  # fmt: skip

LOSS = {
    "arity": Case(Parts(requested="called as loss_fn(params, batch, key)", found="defined as loss_fn(params, batch)", rule="3 positional", repair="def loss_fn(params, batch, key)"), "def loss_fn(params, batch): return sk.mean(batch['x'])"),
    "arity with model state": Case(Parts(requested="called as loss_fn(params, state, batch, key)", found="defined as loss_fn(params, batch, key)", rule="4 positional", repair="def loss_fn(params, state, batch, key)"), STATEFUL),
    "a key that the batch lacks": Case(Parts(requested="loss_fn raised KeyError at", found="'features'", rule="batch has the keys 'x', 'y'"), "def loss_fn(params, batch, key): return sk.mean(batch['features'] @ params['w'])", exit=70),
    "returns nothing": Case(Parts(found="loss_fn returned None as its loss", rule=("sk.mean(...) or (sk.mean(...), metrics)", "uneven replicas"), repair="sk.mean(per_example_loss)"), "def loss_fn(params, batch, key): pass"),
    "returns a number": Case(Parts(found="loss_fn returned float32[] as its loss", rule=("sk.mean(...) or (sk.mean(...), metrics)", "uneven replicas"), repair="sk.mean(per_example_loss)"), "def loss_fn(params, batch, key): return jnp.mean((batch['x'] @ params['w']) ** 2)"),
    "returns a tuple of three": Case(Parts(found="a tuple of 3 (an sk.mean of shape (), dict, dict)", rule="sk.mean(...)", repair=("third value", "a state from init")), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {}"),
    "returns two with model state": Case(Parts(requested="a task with model state", found="a tuple of 2 (an sk.mean of shape (), dict)", rule="(sk.mean(...), {name: sk.mean(...)}, new_state)"), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}"),
    "returns another model state": Case(Parts(requested="model state that differs", found="'count' was float32[] and becomes absent", rule="dtypes stay the same", repair="the whole new state"), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {'n': state['count']}"),
    "metrics are numbers": Case(Parts(requested="loss_fn returned metric 'error'", found="as float32[]", rule=("sk.mean, sk.sum, sk.max or sk.bincount", "replicas and steps"), repair="'error': sk.mean(...)"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'error': jnp.mean(batch['x'])}"),
    "metrics are no dict": Case(Parts(requested="metrics", found="an sk.mean of shape ()", repair="{name: sk.mean(...)}"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), sk.mean(batch['x'])"),
    "metric is called loss": Case(Parts(found="a metric called 'loss'", rule="Names are unique", repair="Rename"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'loss': sk.mean(batch['x'])}"),
    "multiplies two means": Case(Parts(requested="an sk.mean is one number", found="batch, key): return sk.mean(batch['x'] @ params['w']) * sk.mean(params['w'] ** 2)", rule="scalars only"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) * sk.mean(params['w'] ** 2)"),
    "adds an array to a mean": Case(Parts(found=("shape (8,)", "loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + params['b'] ** 2"), rule="scalars only"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + params['b'] ** 2"),
    "takes the mean of a mean": Case(Parts(requested="sk.mean of an sk.mean", found="def loss_fn(params, batch, key): return sk.mean(sk.mean(batch['x'] @ params['w']))", rule="a mean already", repair=("unchanged", "the values")), "def loss_fn(params, batch, key): return sk.mean(sk.mean(batch['x'] @ params['w']))"),
    "shapes do not fit": Case(Parts(requested="loss_fn cannot be traced", found="JAX raised TypeError:", rule="fit together", repair="Fix that line"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['b'])"),
    "unknown axis name": Case(Parts(requested="loss_fn cannot be traced", found="unbound axis name: batch", rule="The replica axes are named 'replica' and 'data'", repair="axis_name=('replica', 'data')"), "def loss_fn(params, batch, key): return sk.mean(jax.lax.pmean(batch['x'], 'batch') @ params['w'])"),
    "mask of sk.mean does not fit": Case(Parts(requested="where has shape (8,)", found=("(2, 8)", "batch, key): return sk.mean(batch['x'] @ params['w'], where=params['b'] > 0)"), rule="Its dims are the first"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w'], where=params['b'] > 0)"),
    "raises": Case(Parts(requested="loss_fn raised ValueError at", found="ValueError: not today"), "def loss_fn(params, batch, key):\n    raise ValueError('not today')", exit=70),
    "branches on a value": Case(Parts(requested="loss_fn cannot be traced", found="TracerBoolConversionError", rule="no values", repair=("jnp.where", "jax.lax.cond", "jnp for np")), "def loss_fn(params, batch, key):\n    e = batch['x'] @ params['w']\n    return sk.mean(e if e.sum() > 0 else -e)"),
    "uses the padding without an example dim": Case(Parts(requested="sk.mean", found=("shape ()", "3 examples", "def loss_fn(params, batch, key): return sk.mean((batch['x'] @ params['w']).sum())"), rule="first dim"), "def loss_fn(params, batch, key): return sk.mean((batch['x'] @ params['w']).sum())", config={"batch_size": "12", "data": "{drop_remainder: false}"}),
    "shards by an unknown name": Case(Parts(requested="sk.shard", found=("unknown name 'mpl'", "batch, key): return sk.mean(sk.shard(batch['x'] @ params['w'], 'batch', 'mpl'))"), rule="batch, context, data"), "def loss_fn(params, batch, key): return sk.mean(sk.shard(batch['x'] @ params['w'], 'batch', 'mpl'))", config={"mesh": "{data: 2, fsdp: 2}"}),
}  # fmt: skip

TRAIN_STEP = {
    "arity": Case(Parts(requested="called as train_step(state, batch)", found="defined as train_step(state)", rule="2 positional", repair="def train_step(state, batch)"), "def train_step(state): return state, {}", STEP),
    "returns the state alone": Case(Parts(found="train_step returned TrainState", rule="(state, metrics)", repair=("the TrainState", "dict of scalars")), "def train_step(state, batch): return state", STEP),
    "returns a metric of a shape": Case(Parts(requested="train_step returned metric 'loss'", found="as float32[8,4]", rule=("sk.mean, sk.sum, sk.max or sk.bincount", "or a scalar"), repair="'loss': sk.mean(...)"), "def train_step(state, batch): return state, {'loss': batch['x']}", STEP),
    "changes a dtype": Case(Parts(requested="train_step changed the state", found="'params/b' was float32[8] and becomes bfloat16[8]", rule="stay the same"), "def train_step(state, batch): return state.replace(params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)), {'loss': jnp.zeros(())}", STEP),
    "an unknown field of the state": Case(Parts(requested="train_step raised TypeError at", found="TypeError: TrainState.__init__() got an unexpected keyword argument 'param'"), "def train_step(state, batch): return state.replace(param=state.params), {'loss': jnp.zeros(())}", STEP, exit=70),
    "does not use microbatches": Case(Parts(requested="microbatches: 2", found=("no effect", "train_step never calls sk.value_and_grad"), repair="microbatches: 1"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"microbatches": "2"}),
    "ignores the padding": Case(Parts(requested="data.drop_remainder is false", found="neither sk.value_and_grad, sk.mean nor sk.example_mask", rule="count as examples", repair="data.drop_remainder: true"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"batch_size": "12", "data": "{drop_remainder: false}"}),
    "gradient of another tree": Case(Parts(requested="apply_gradients", found=("lacks b", "return state.apply_gradients({'w': g['w']}), {'loss': loss}"), rule="like the parameters (b, w)"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients({'w': g['w']}), {'loss': loss}", STEP),
    "value_and_grad of a plain loss": Case(Parts(found="loss_fn returned float32[] as its loss", rule="sk.mean(...) or (sk.mean(...), metrics)", repair="_), g = sk.value_and_grad(lambda p, b, k: error(p, b))(state.params, batch, state.key)"), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(lambda p, b, k: error(p, b))(state.params, batch, state.key)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "value_and_grad with too few arguments": Case(Parts(requested="sk.value_and_grad(loss_fn)", found=("2 arguments", "(loss, _), g = sk.value_and_grad(loss_fn)(state.params, batch)"), rule="(params, batch, key)"), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(loss_fn)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "raises": Case(Parts(requested="train_step raised RuntimeError at", found="RuntimeError: not today"), "def train_step(state, batch): raise RuntimeError('not today')", STEP, exit=70),
    "reduces in the global view": Case(Parts(requested="sk.pmean", found=("outside of a per-replica step", "g = sk.pmean(g)"), rule="global view", repair="view='replica'"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    g = sk.pmean(g)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "missing reduction": Case(Parts(requested="gradient 'b'", found=("differs between the replicas", "['data']", "return state.apply_gradients(g), {'loss': sk.pmean(loss)}"), rule="reduction"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': sk.pmean(loss)}", REPLICA),
    "missing reduction of a metric": Case(Parts(requested="train_step: metric 'loss'", found=("differs between the replicas", "['data']"), rule="the same on every replica", repair="sk.pmean"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.pmean(g)), {'loss': loss}", REPLICA),
    "reduced twice": Case(Parts(requested="sk.psum: leaf 'b'", found=("reduced twice", "return state.apply_gradients(sk.psum(sk.pmean(g))), {'loss': sk.pmean(loss)}"), rule="the same on every replica"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.psum(sk.pmean(g))), {'loss': sk.pmean(loss)}", REPLICA),
    "model axes in the per-replica view": Case(Parts(requested="view='replica'", found="model axes ['fsdp']", rule="unsharded parameters", repair=("replica and data", "sk.value_and_grad")), GRAD + "def train_step(state, batch):\n    return state, {}", REPLICA, {"mesh": "{data: 2, fsdp: 2}"}),
}  # fmt: skip

EVAL = {
    "arity": Case(Parts(requested="called as eval_fn(params, batch)", found="defined as eval_fn(params)", rule="2 positional", repair="def eval_fn(params, batch)"), "def eval_fn(params): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns a number": Case(Parts(found="eval_fn returned float32[]", repair="{name: sk.mean(...)}"), "def eval_fn(params, batch): return jnp.mean(batch['x'])", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns no metric": Case(Parts(found="eval_fn returned an empty dict", rule="at least one metric", repair="{'loss': sk.mean(...)}"), "def eval_fn(params, batch): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "eval_data of other shapes": Case(Parts(requested="loss_fn in evaluation cannot be traced", found="JAX raised TypeError:", rule="fit together", repair="Fix that line"), "", {"eval_data": "{'x': DATA['x'][:, :3], 'y': DATA['y']}"}),
    "the best by a metric that is not there": Case(Parts(requested="checkpoint.best.metric is accuracy", found="the evaluation has loss", repair="Use one"), "", {"eval_data": "DATA"}, {"eval": "{every_steps: 2}", "checkpoint": "{best: {metric: accuracy, mode: max}}"}),
    "only a train_step": Case(Parts(requested="evaluation needs Task.eval_fn or Task.loss_fn", found="only train_step", repair="Pass eval_fn"), "def train_step(state, batch): return state, {'loss': jnp.zeros(())}", {**STEP, "eval_data": "DATA"}),
}  # fmt: skip

MISTAKES = {"config": CONFIG, "data": DATA, "task": TASK, "init": INIT, "loss": LOSS, "step": TRAIN_STEP, "eval": EVAL}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in MISTAKES.items() for name in cases])
def test_a_mistake_is_reported_and_its_repair_works(kind, name, folder):
    MISTAKES[kind][name].run_and_repair(folder, REPAIRS[kind][name], is_new=True)
