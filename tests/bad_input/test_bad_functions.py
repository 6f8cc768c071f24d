"""The functions of the task: arity, what they return, shapes that do not fit, exceptions of their own."""

import pytest

from tests.support.command_line import Case
from tests.support.messages import Says

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
    "arity": Case(Says(asked="called as init(key)", found="defined as init()", rule="1 positional", repair="def init(key)"), "def init(): return {'w': jnp.zeros(4)}"),
    "needs more": Case(Says(asked="called as init(key)", found="defined as init(key, width)", rule="1 positional", repair="def init(key)"), "def init(key, width): return {'w': jnp.zeros(width)}"),
    "returns nothing": Case(Says(asked="init", found="no arrays", rule="at least one array"), "def init(key): pass"),
    "returns an empty dict": Case(Says(asked="init", found="no arrays", rule="at least one array"), "def init(key): return {}"),
    "returns a Python number": Case(Says(asked="at 'params/b'", found="init returned float", rule="leaf of the parameters is an array", repair="jnp.asarray"), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': 0.0}"),
    "returns text": Case(Says(asked="at 'params/name'", found="init returned str", rule="leaf of the parameters is an array", repair="jnp.asarray"), "def init(key): return {'w': jnp.zeros((4, 8)), 'name': 'linear'}"),
    "returns integers": Case(Says(asked="init returned parameter 'w'", found="as int32", rule="floating point", repair="sk.Variables(params, state)"), "def init(key): return {'w': jnp.zeros((4, 8), jnp.int32), 'b': jnp.zeros(8)}"),
    "returns params and state in a tuple": Case(Says(asked="init returned parameter '1/steps'", found="as int32", rule="floating point", repair="sk.Variables(params, state)"), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8)}, {'steps': jnp.zeros((), jnp.int32)}"),
    "returns a random key": Case(Says(asked="init returned parameter 'key'", found="as key<fry>", rule="floating point", repair="sk.Variables(params, state)"), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8), 'key': key}"),
    "returns an object": Case(Says(asked="at 'params'", found="init returned Model", rule="leaf of the parameters is an array", repair="jnp.asarray"), "class Model: pass\ndef init(key): return Model()"),
    "shapes do not fit": Case(Says(asked="init cannot be traced", found="JAX raised TypeError:", rule="fit together", repair="Fix that line"), "def init(key): return {'w': jnp.zeros((4, 8)) @ jnp.zeros((4, 8)), 'b': jnp.zeros(8)}"),
    "raises": Case(Says(asked="init raised RuntimeError at", found="RuntimeError: no weights"), "def init(key): raise RuntimeError('no weights')", exit=70),
    "reads a value": Case(Says(asked="init cannot be traced", found="TracerBoolConversionError", rule="no values", repair=("jnp.where", "jax.lax.cond", "jnp for np")), "def init(key):\n    w = jax.random.normal(key, (4, 8))\n    return {'w': w if w.sum() > 0 else -w, 'b': jnp.zeros(8)}"),
}  # fmt: skip

LOSS = {
    "arity": Case(Says(asked="called as loss_fn(params, batch, key)", found="defined as loss_fn(params, batch)", rule="3 positional", repair="def loss_fn(params, batch, key)"), "def loss_fn(params, batch): return sk.mean(batch['x'])"),
    "needs more": Case(Says(asked="called as loss_fn(params, batch, key)", found="defined as loss_fn(params, state, batch, key)", rule="3 positional", repair="def loss_fn(params, batch, key)"), "def loss_fn(params, state, batch, key): return sk.mean(batch['x'])"),
    "arity with model state": Case(Says(asked="called as loss_fn(params, state, batch, key)", found="defined as loss_fn(params, batch, key)", rule="4 positional", repair="def loss_fn(params, state, batch, key)"), STATEFUL),
    "returns nothing": Case(Says(found="loss_fn returned None as its loss", rule=("sk.mean(...) or (sk.mean(...), metrics)", "uneven replicas"), repair="sk.mean(per_example_loss)"), "def loss_fn(params, batch, key): pass"),
    "returns a number": Case(Says(found="loss_fn returned float32[] as its loss", rule=("sk.mean(...) or (sk.mean(...), metrics)", "uneven replicas"), repair="sk.mean(per_example_loss)"), "def loss_fn(params, batch, key): return jnp.mean((batch['x'] @ params['w']) ** 2)"),
    "returns one per example": Case(Says(found="loss_fn returned float32[2] as its loss", rule=("sk.mean(...) or (sk.mean(...), metrics)", "uneven replicas"), repair="sk.mean(per_example_loss)"), "def loss_fn(params, batch, key): return ((batch['x'] @ params['w']) ** 2).mean(1)"),
    "returns a tuple of three": Case(Says(found="a tuple of 3 (a sk.mean of shape (), dict, dict)", rule="sk.mean(...)", repair=("third value", "a state from init")), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {}"),
    "returns two with model state": Case(Says(asked="a task with model state", found="a tuple of 2 (a sk.mean of shape (), dict)", rule="(sk.mean(...), {name: sk.mean(...)}, new_state)"), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}"),
    "returns another model state": Case(Says(asked="model state that differs", found="'count' was float32[] and becomes absent", rule="dtypes stay the same", repair="the whole new state"), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {'n': state['count']}"),
    "changes the shape of the model state": Case(Says(asked="model state that differs", found="'count' was float32[] and becomes", rule="dtypes stay the same", repair="the whole new state"), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {'count': state['count'][None]}"),
    "loses the model state": Case(Says(asked="model state that differs", found="'count' was float32[] and becomes absent", rule="dtypes stay the same", repair="the whole new state"), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, None"),
    "metrics are numbers": Case(Says(asked="loss_fn returned metric 'error'", found="as float32[]", rule=("sk.mean, sk.sum, sk.max or sk.bincount", "replicas and steps"), repair="'error': sk.mean(...)"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'error': jnp.mean(batch['x'])}"),
    "metrics are no dict": Case(Says(asked="metrics", found="a sk.mean of shape ()", repair="{name: sk.mean(...)}"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), sk.mean(batch['x'])"),
    "metrics are nested": Case(Says(asked="loss_fn returned metric 'a'", found="as dict", rule=("sk.mean, sk.sum, sk.max or sk.bincount", "replicas and steps"), repair="'a': sk.mean(...)"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'a': {'b': sk.mean(batch['x'])}}"),
    "metric is called loss": Case(Says(found="a metric called 'loss'", rule="Names are unique", repair="Rename"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'loss': sk.mean(batch['x'])}"),
    "metric has a name that is a number": Case(Says(found="a metric called 1", rule=("a string", "step, split, examples_per_s, step_time_s, input_wait_s"), repair="Rename"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {1: sk.mean(batch['x'])}"),
    "multiplies two means": Case(Says(asked="a sk.mean is one number", found="batch, key): return sk.mean(batch['x'] @ params['w']) * sk.mean(params['w'] ** 2)", rule="scalars only"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) * sk.mean(params['w'] ** 2)"),
    "adds an array to a mean": Case(Says(found=("shape (8,)", "loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + params['b'] ** 2"), rule="scalars only"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + params['b'] ** 2"),
    "takes the mean of a mean": Case(Says(asked="sk.mean of a sk.mean", found="def loss_fn(params, batch, key): return sk.mean(sk.mean(batch['x'] @ params['w']))", rule="a mean already", repair=("unchanged", "the values")), "def loss_fn(params, batch, key): return sk.mean(sk.mean(batch['x'] @ params['w']))"),
    "shapes do not fit": Case(Says(asked="loss_fn cannot be traced", found="JAX raised TypeError:", rule="fit together", repair="Fix that line"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['b'])"),
    "shapes do not broadcast": Case(Says(asked="loss_fn cannot be traced", found="JAX raised TypeError:", rule="fit together", repair="Fix that line"), "def loss_fn(params, batch, key): return sk.mean(batch['y'] - batch['x'])"),
    "mask of sk.mean does not fit": Case(Says(asked="where has shape (8,)", found=("(2, 8)", "batch, key): return sk.mean(batch['x'] @ params['w'], where=params['b'] > 0)"), rule="Its dims are the first"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w'], where=params['b'] > 0)"),
    "raises": Case(Says(asked="loss_fn raised ValueError at", found="ValueError: not today"), "def loss_fn(params, batch, key):\n    raise ValueError('not today')", exit=70),
    "asks for a missing key of the batch": Case(Says(asked="loss_fn raised KeyError at", found="KeyError: 'z'"), "def loss_fn(params, batch, key): return sk.mean(batch['z'] @ params['w'])", exit=70),
    "branches on a value": Case(Says(asked="loss_fn cannot be traced", found="TracerBoolConversionError", rule="no values", repair=("jnp.where", "jax.lax.cond", "jnp for np")), "def loss_fn(params, batch, key):\n    e = batch['x'] @ params['w']\n    return sk.mean(e if e.sum() > 0 else -e)"),
    "calls numpy": Case(Says(asked="loss_fn cannot be traced", found="TracerArrayConversionError", rule="no values", repair=("jnp.where", "jax.lax.cond", "jnp for np")), "def loss_fn(params, batch, key): return sk.mean(np.sin(batch['x'] @ params['w']))"),
    "uses the padding without an example dim": Case(Says(asked="sk.mean", found=("shape ()", "3 examples", "def loss_fn(params, batch, key): return sk.mean((batch['x'] @ params['w']).sum())"), rule="first dim"), "def loss_fn(params, batch, key): return sk.mean((batch['x'] @ params['w']).sum())", config={"batch_size": "12", "data": "{drop_remainder: false}"}),
    "names an unknown axis": Case(Says(asked="loss_fn cannot be traced", found="JAX raised", rule="fit together", repair="Fix that line"), "def loss_fn(params, batch, key): return sk.mean(jax.lax.pmean(batch['x'] @ params['w'], 'dataa'))"),
    "shards by an unknown name": Case(Says(asked="sk.shard", found=("unknown name 'mpl'", "batch, key): return sk.mean(sk.shard(batch['x'] @ params['w'], 'batch', 'mpl'))"), rule="batch, context, data"), "def loss_fn(params, batch, key): return sk.mean(sk.shard(batch['x'] @ params['w'], 'batch', 'mpl'))", config={"mesh": "{data: 2, fsdp: 2}"}),
}  # fmt: skip

TRAIN_STEP = {
    "arity": Case(Says(asked="called as train_step(state, batch)", found="defined as train_step(state)", rule="2 positional", repair="def train_step(state, batch)"), "def train_step(state): return state, {}", STEP),
    "returns the state alone": Case(Says(found="train_step returned TrainState", rule="(state, metrics)", repair=("the TrainState", "dict of scalars")), "def train_step(state, batch): return state", STEP),
    "returns the parameters": Case(Says(found="train_step returned 2 values (dict, dict)", rule="(state, metrics)", repair=("the TrainState", "dict of scalars")), "def train_step(state, batch): return state.params, {}", STEP),
    "returns nothing": Case(Says(found="train_step returned None", rule="(state, metrics)", repair=("the TrainState", "dict of scalars")), "def train_step(state, batch): pass", STEP),
    "returns metrics that are no dict": Case(Says(found="train_step returned 2 values (TrainState, float32[])", rule="(state, metrics)", repair=("the TrainState", "dict of scalars")), "def train_step(state, batch): return state, jnp.zeros(())", STEP),
    "returns a metric of a shape": Case(Says(asked="train_step returned metric 'loss'", found="as float32[8,4]", rule=("sk.mean, sk.sum, sk.max or sk.bincount", "or a scalar"), repair="'loss': sk.mean(...)"), "def train_step(state, batch): return state, {'loss': batch['x']}", STEP),
    "returns a metric that is text": Case(Says(asked="train_step returned metric 'name'", found="as str", rule=("sk.mean, sk.sum, sk.max or sk.bincount", "or a scalar"), repair="'name': sk.mean(...)"), "def train_step(state, batch): return state, {'loss': jnp.zeros(()), 'name': 'a'}", STEP),
    "changes a dtype": Case(Says(asked="train_step changed the state", found="'params/b' was float32[8] and becomes bfloat16[8]", rule="stay the same"), "def train_step(state, batch): return state.replace(params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)), {'loss': jnp.zeros(())}", STEP),
    "changes a shape": Case(Says(asked="train_step changed the state", found="'params/b' was float32[8] and becomes float32[9]", rule="stay the same"), "def train_step(state, batch): return state.replace(params={**state.params, 'b': jnp.zeros(9)}), {'loss': jnp.zeros(())}", STEP),
    "an unknown field of the state": Case(Says(asked="train_step raised TypeError at", found="TypeError: TrainState.__init__() got an unexpected keyword argument 'param'"), "def train_step(state, batch): return state.replace(param=state.params), {'loss': jnp.zeros(())}", STEP, exit=70),
    "does not use microbatches": Case(Says(asked="microbatches: 2", found=("no effect", "train_step never calls sk.value_and_grad"), repair="microbatches: 1"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"microbatches": "2"}),
    "ignores the padding": Case(Says(asked="data.drop_remainder is false", found="neither sk.value_and_grad, sk.mean nor sk.example_mask", rule="count as examples", repair="data.drop_remainder: true"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"batch_size": "12", "data": "{drop_remainder: false}"}),
    "gradient of another tree": Case(Says(asked="apply_gradients", found=("lacks b", "return state.apply_gradients({'w': g['w']}), {'loss': loss}"), rule="like the parameters (b, w)"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients({'w': g['w']}), {'loss': loss}", STEP),
    "value_and_grad of a plain loss": Case(Says(found="loss_fn returned float32[] as its loss", rule="sk.mean(...) or (sk.mean(...), metrics)", repair="_), g = sk.value_and_grad(lambda p, b, k: error(p, b))(state.params, batch, state.key)"), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(lambda p, b, k: error(p, b))(state.params, batch, state.key)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "value_and_grad with too few arguments": Case(Says(asked="sk.value_and_grad(loss_fn)", found=("2 arguments", "(loss, _), g = sk.value_and_grad(loss_fn)(state.params, batch)"), rule="(params, batch, key)"), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(loss_fn)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "raises": Case(Says(asked="train_step raised RuntimeError at", found="RuntimeError: not today"), "def train_step(state, batch): raise RuntimeError('not today')", STEP, exit=70),
    "reduces in the global view": Case(Says(asked="sk.pmean", found=("outside of a per-replica step", "g = sk.pmean(g)"), rule="global view", repair="view='replica'"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    g = sk.pmean(g)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "missing reduction": Case(Says(asked="gradient 'b'", found=("differs between the replicas", "['data']", "return state.apply_gradients(g), {'loss': sk.pmean(loss)}"), rule="reduction"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': sk.pmean(loss)}", REPLICA),
    "missing reduction of a metric": Case(Says(asked="train_step: metric 'loss'", found=("differs between the replicas", "['data']"), rule="the same on every replica", repair="sk.pmean"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.pmean(g)), {'loss': loss}", REPLICA),
    "reduced twice": Case(Says(asked="sk.pmean: leaf 'b'", found=("reduced twice", "return state.apply_gradients(sk.pmean(sk.pmean(g))), {'loss': sk.pmean(loss)}"), rule="the same on every replica"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.pmean(sk.pmean(g))), {'loss': sk.pmean(loss)}", REPLICA),
    "reduced twice by hand": Case(Says(asked="lax.psum or lax.pmean: the operand at", found="too large", repair=("Remove one", "sk.value_and_grad has already reduced")), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    g = sk.pmean(g)\n    g = jax.lax.psum(g, ('replica', 'data'))\n    return state.apply_gradients(g), {'loss': sk.pmean(loss)}", REPLICA),
    "model axes in the per-replica view": Case(Says(asked="view='replica'", found="model axes ['fsdp']", rule="unsharded parameters", repair=("replica and data", "sk.value_and_grad")), GRAD + "def train_step(state, batch):\n    return state, {}", REPLICA, {"mesh": "{data: 2, fsdp: 2}"}),
}  # fmt: skip

EVAL = {
    "arity": Case(Says(asked="called as eval_fn(params, batch)", found="defined as eval_fn(params)", rule="2 positional", repair="def eval_fn(params, batch)"), "def eval_fn(params): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns a number": Case(Says(found="eval_fn returned float32[]", repair="{name: sk.mean(...)}"), "def eval_fn(params, batch): return jnp.mean(batch['x'])", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns plain numbers": Case(Says(asked="eval_fn returned metric 'loss'", found="as float32[]", rule=("sk.mean, sk.sum, sk.max or sk.bincount", "replicas and steps"), repair="'loss': sk.mean(...)"), "def eval_fn(params, batch): return {'loss': jnp.mean(batch['x'])}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns no metric": Case(Says(found="eval_fn returned an empty dict", rule="at least one metric", repair="{'loss': sk.mean(...)}"), "def eval_fn(params, batch): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "raises": Case(Says(asked="eval_fn raised ValueError at", found="ValueError: not today"), "def eval_fn(params, batch): raise ValueError('not today')", {"eval_data": "DATA", "eval_fn": "eval_fn"}, exit=70),
    "eval_data of other shapes": Case(Says(asked="loss_fn in evaluation cannot be traced", found="JAX raised TypeError:", rule="fit together", repair="Fix that line"), "", {"eval_data": "{'x': DATA['x'][:, :3], 'y': DATA['y']}"}),
    "eval_data without a key": Case(Says(asked="loss_fn in evaluation raised KeyError at", found="KeyError: 'y'"), "", {"eval_data": "{'x': DATA['x']}"}, exit=70),
    "the best by a metric that is not there": Case(Says(asked="checkpoint.best.metric is accuracy", found="the evaluation has loss", repair="Use one"), "", {"eval_data": "DATA"}, {"eval": "{every_steps: 2}", "checkpoint": "{best: {metric: accuracy, mode: max}}"}),
    "only a train_step": Case(Says(asked="evaluation needs Task.eval_fn or Task.loss_fn", found="only train_step", repair="Give eval_fn"), "def train_step(state, batch): return state, {'loss': jnp.zeros(())}", {**STEP, "eval_data": "DATA"}),
}  # fmt: skip


@pytest.mark.parametrize("name", INIT)
def test_init(name, folder):
    INIT[name].run(folder)


@pytest.mark.parametrize("name", LOSS)
def test_loss_fn(name, folder):
    LOSS[name].run(folder)


@pytest.mark.parametrize("name", TRAIN_STEP)
def test_train_step(name, folder):
    TRAIN_STEP[name].run(folder)


@pytest.mark.parametrize("name", EVAL)
def test_evaluation(name, folder):
    EVAL[name].run(folder)
