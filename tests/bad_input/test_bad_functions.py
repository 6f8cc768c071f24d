"""The functions of the task: arity, what they return, shapes that do not fit, exceptions of their own."""

import pytest
from command_line import Case

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
    "arity": Case((), "def init(): return {'w': jnp.zeros(4)}"),
    "needs more": Case((), "def init(key, width): return {'w': jnp.zeros(width)}"),
    "returns nothing": Case((), "def init(key): pass"),
    "returns an empty dict": Case((), "def init(key): return {}"),
    "returns a Python number": Case((), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': 0.0}"),
    "returns text": Case((), "def init(key): return {'w': jnp.zeros((4, 8)), 'name': 'linear'}"),
    "returns integers": Case((), "def init(key): return {'w': jnp.zeros((4, 8), jnp.int32), 'b': jnp.zeros(8)}"),
    "returns params and state in a tuple": Case((), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8)}, {'steps': jnp.zeros((), jnp.int32)}"),
    "returns a random key": Case((), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8), 'key': key}"),
    "returns an object": Case((), "class Model: pass\ndef init(key): return Model()"),
    "shapes do not fit": Case((), "def init(key): return {'w': jnp.zeros((4, 8)) @ jnp.zeros((4, 8)), 'b': jnp.zeros(8)}"),
    "raises": Case((), "def init(key): raise RuntimeError('no weights')", exit=70),
    "reads a value": Case((), "def init(key):\n    w = jax.random.normal(key, (4, 8))\n    return {'w': w if w.sum() > 0 else -w, 'b': jnp.zeros(8)}"),
}  # fmt: skip

LOSS = {
    "arity": Case((), "def loss_fn(params, batch): return sk.mean(batch['x'])"),
    "needs more": Case((), "def loss_fn(params, state, batch, key): return sk.mean(batch['x'])"),
    "arity with model state": Case((), STATEFUL),
    "returns nothing": Case((), "def loss_fn(params, batch, key): pass"),
    "returns a number": Case((), "def loss_fn(params, batch, key): return jnp.mean((batch['x'] @ params['w']) ** 2)"),
    "returns one per example": Case((), "def loss_fn(params, batch, key): return ((batch['x'] @ params['w']) ** 2).mean(1)"),
    "returns a tuple of three": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {}"),
    "returns two with model state": Case((), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}"),
    "returns another model state": Case((), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {'n': state['count']}"),
    "changes the shape of the model state": Case((), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {'count': state['count'][None]}"),
    "loses the model state": Case((), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, None"),
    "metrics are numbers": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'error': jnp.mean(batch['x'])}"),
    "metrics are no dict": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), sk.mean(batch['x'])"),
    "metrics are nested": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'a': {'b': sk.mean(batch['x'])}}"),
    "metric is called loss": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'loss': sk.mean(batch['x'])}"),
    "metric has a name that is a number": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {1: sk.mean(batch['x'])}"),
    "adds two means": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + sk.mean(params['w'] ** 2)"),
    "adds an array to a mean": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + params['b'] ** 2"),
    "takes the mean of a mean": Case((), "def loss_fn(params, batch, key): return sk.mean(sk.mean(batch['x'] @ params['w']))"),
    "shapes do not fit": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['b'])"),
    "shapes do not broadcast": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['y'] - batch['x'])"),
    "mask of sk.mean does not fit": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w'], where=params['b'] > 0)"),
    "raises": Case((), "def loss_fn(params, batch, key):\n    raise ValueError('not today')", exit=70),
    "asks for a missing key of the batch": Case((), "def loss_fn(params, batch, key): return sk.mean(batch['z'] @ params['w'])", exit=70),
    "branches on a value": Case((), "def loss_fn(params, batch, key):\n    e = batch['x'] @ params['w']\n    return sk.mean(e if e.sum() > 0 else -e)"),
    "calls numpy": Case((), "def loss_fn(params, batch, key): return sk.mean(np.sin(batch['x'] @ params['w']))"),
    "uses the padding without an example dim": Case((), "def loss_fn(params, batch, key): return sk.mean((batch['x'] @ params['w']).sum())", config={"batch_size": "12", "data": "{remainder: mask}"}),
    "names an unknown axis": Case((), "def loss_fn(params, batch, key): return sk.mean(jax.lax.pmean(batch['x'] @ params['w'], 'dataa'))"),
    "shards by an unknown name": Case((), "def loss_fn(params, batch, key): return sk.mean(sk.shard(batch['x'] @ params['w'], 'batch', 'mpl'))", config={"mesh": "{data: 2, fsdp: 2}"}),
    "reduces in the global view": Case((), "def loss_fn(params, batch, key): return sk.pmean(sk.mean(batch['x'] @ params['w']))"),
}  # fmt: skip

TRAIN_STEP = {
    "arity": Case((), "def train_step(state): return state, {}", STEP),
    "returns the state alone": Case((), "def train_step(state, batch): return state", STEP),
    "returns the parameters": Case((), "def train_step(state, batch): return state.params, {}", STEP),
    "returns nothing": Case((), "def train_step(state, batch): pass", STEP),
    "returns metrics that are no dict": Case((), "def train_step(state, batch): return state, jnp.zeros(())", STEP),
    "returns a metric of a shape": Case((), "def train_step(state, batch): return state, {'loss': batch['x']}", STEP),
    "returns a metric that is text": Case((), "def train_step(state, batch): return state, {'loss': jnp.zeros(()), 'name': 'a'}", STEP),
    "changes a dtype": Case((), "def train_step(state, batch): return state.replace(params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)), {'loss': jnp.zeros(())}", STEP),
    "changes a shape": Case((), "def train_step(state, batch): return state.replace(params={**state.params, 'b': jnp.zeros(9)}), {'loss': jnp.zeros(())}", STEP),
    "an unknown field of the state": Case((), "def train_step(state, batch): return state.replace(param=state.params), {'loss': jnp.zeros(())}", STEP),
    "does not use microbatches": Case((), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"microbatches": "2"}),
    "ignores the padding": Case((), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"batch_size": "12", "data": "{remainder: mask}"}),
    "gradient of another tree": Case((), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients({'w': g['w']}), {'loss': loss}", STEP),
    "value_and_grad of a plain loss": Case((), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(lambda p, b, k: error(p, b))(state.params, batch, state.key)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "value_and_grad with too few arguments": Case((), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(loss_fn)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "raises": Case((), "def train_step(state, batch): raise RuntimeError('not today')", STEP, exit=70),
    "missing reduction": Case((), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': sk.pmean(loss)}", REPLICA),
    "missing reduction of a metric": Case((), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.pmean(g)), {'loss': loss}", REPLICA),
    "reduced twice": Case((), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.pmean(sk.pmean(g))), {'loss': sk.pmean(loss)}", REPLICA),
    "reduced twice by hand": Case((), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    g = sk.pmean(g)\n    g = jax.lax.psum(g, ('replica', 'data'))\n    return state.apply_gradients(g), {'loss': sk.pmean(loss)}", REPLICA),
    "model axes in the per-replica view": Case((), GRAD + "def train_step(state, batch):\n    return state, {}", REPLICA, {"mesh": "{data: 2, fsdp: 2}"}),
}  # fmt: skip

EVAL = {
    "arity": Case((), "def eval_fn(params): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns a number": Case((), "def eval_fn(params, batch): return jnp.mean(batch['x'])", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns plain numbers": Case((), "def eval_fn(params, batch): return {'loss': jnp.mean(batch['x'])}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns no metric": Case((), "def eval_fn(params, batch): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "raises": Case((), "def eval_fn(params, batch): raise ValueError('not today')", {"eval_data": "DATA", "eval_fn": "eval_fn"}, exit=70),
    "eval_data of other shapes": Case((), "", {"eval_data": "{'x': DATA['x'][:, :3], 'y': DATA['y']}"}),
    "eval_data without a key": Case((), "", {"eval_data": "{'x': DATA['x']}"}, exit=70),
    "only a train_step": Case((), "def train_step(state, batch): return state, {'loss': jnp.zeros(())}", {**STEP, "eval_data": "DATA"}),
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
