"""The functions of the task: arity, what they return, shapes that do not fit, exceptions of their own."""

import pytest

from tests.support.command_line import Case

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
    "arity": Case(("init is defined as init(), and is called as init(key). It takes 1 positional argument. Write def init(key).",), "def init(): return {'w': jnp.zeros(4)}"),
    "needs more": Case(("init is defined as init(key, width), and is called as init(key). It takes 1 positional argument. Write def init(key).",), "def init(key, width): return {'w': jnp.zeros(width)}"),
    "returns nothing": Case(("init returned no arrays. The parameters are a pytree with at least one array.",), "def init(key): pass"),
    "returns an empty dict": Case(("init returned no arrays. The parameters are a pytree with at least one array.",), "def init(key): return {}"),
    "returns a Python number": Case(("init returned float at 'params/b'. Every leaf of the parameters is an array. Use jnp.asarray for numbers, and keep what is no array out of the pytree.",), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': 0.0}"),
    "returns text": Case(("init returned str at 'params/name'. Every leaf of the parameters is an array. Use jnp.asarray for numbers, and keep what is no array out of the pytree.",), "def init(key): return {'w': jnp.zeros((4, 8)), 'name': 'linear'}"),
    "returns integers": Case(("init returned parameter 'w' as int32. Parameters are floating point, since they have a gradient. Return other arrays as model state: sk.Variables(params, state).",), "def init(key): return {'w': jnp.zeros((4, 8), jnp.int32), 'b': jnp.zeros(8)}"),
    "returns params and state in a tuple": Case(("init returned parameter '1/steps' as int32. Parameters are floating point, since they have a gradient. Return other arrays as model state: sk.Variables(params, state).",), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8)}, {'steps': jnp.zeros((), jnp.int32)}"),
    "returns a random key": Case(("init returned parameter 'key' as key<fry>. Parameters are floating point, since they have a gradient. Return other arrays as model state: sk.Variables(params, state).",), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8), 'key': key}"),
    "returns an object": Case(("init returned Model at 'params'. Every leaf of the parameters is an array. Use jnp.asarray for numbers, and keep what is no array out of the pytree.",), "class Model: pass\ndef init(key): return Model()"),
    "shapes do not fit": Case(("init cannot be traced: JAX raised TypeError:", "The shapes and dtypes in it have to fit together. Mend that line."), "def init(key): return {'w': jnp.zeros((4, 8)) @ jnp.zeros((4, 8)), 'b': jnp.zeros(8)}"),
    "raises": Case(("init raised RuntimeError at", "RuntimeError: no weights"), "def init(key): raise RuntimeError('no weights')", exit=70),
    "reads a value": Case(("init cannot be traced: JAX raised TracerBoolConversionError:", "and no values. Use jnp.where or jax.lax.cond for `if`, and jnp for np, float() and int()."), "def init(key):\n    w = jax.random.normal(key, (4, 8))\n    return {'w': w if w.sum() > 0 else -w, 'b': jnp.zeros(8)}"),
}  # fmt: skip

LOSS = {
    "arity": Case(("loss_fn is defined as loss_fn(params, batch), and is called as loss_fn(params, batch, key). It takes 3 positional arguments. Write def loss_fn(params, batch, key).",), "def loss_fn(params, batch): return sk.mean(batch['x'])"),
    "needs more": Case(("loss_fn is defined as loss_fn(params, state, batch, key), and is called as loss_fn(params, batch, key). It takes 3 positional arguments. Write def loss_fn(params, batch, key).",), "def loss_fn(params, state, batch, key): return sk.mean(batch['x'])"),
    "arity with model state": Case(("loss_fn is defined as loss_fn(params, batch, key), and is called as loss_fn(params, state, batch,", "key). It takes 4 positional arguments. Write def loss_fn(params, state, batch, key)."), STATEFUL),
    "returns nothing": Case(("loss_fn returned None as its loss. It must return sk.mean(...) or (sk.mean(...), metrics): a plain", "a plain number cannot be averaged over uneven replicas. Return sk.mean(per_example_loss)."), "def loss_fn(params, batch, key): pass"),
    "returns a number": Case(("loss_fn returned float32[] as its loss. It must return sk.mean(...) or (sk.mean(...), metrics): a", "a plain number cannot be averaged over uneven replicas. Return sk.mean(per_example_loss)."), "def loss_fn(params, batch, key): return jnp.mean((batch['x'] @ params['w']) ** 2)"),
    "returns one per example": Case(("loss_fn returned float32[2] as its loss. It must return sk.mean(...) or (sk.mean(...), metrics): a", "a plain number cannot be averaged over uneven replicas. Return sk.mean(per_example_loss)."), "def loss_fn(params, batch, key): return ((batch['x'] @ params['w']) ** 2).mean(1)"),
    "returns a tuple of three": Case(("loss_fn returned a tuple of 3 (a sk.mean of shape (), dict, dict). It must return sk.mean(...) or", "state) returns a model state too. Drop the third value, or give init a state."), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {}"),
    "returns two with model state": Case(("loss_fn of a task with model state returned a tuple of 2 (a sk.mean of shape (), dict). It must return (sk.mean(...), {name: sk.mean(...)}, new_state).",), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}"),
    "returns another model state": Case(("loss_fn returned another model state than it was given: 'count' was float32[] and becomes absent.", "and dtypes stay the same over all steps. Return the whole new state, cast where needed."), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {'n': state['count']}"),
    "changes the shape of the model state": Case(("loss_fn returned another model state than it was given: 'count' was float32[] and becomes", "and dtypes stay the same over all steps. Return the whole new state, cast where needed."), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, {'count': state['count'][None]}"),
    "loses the model state": Case(("loss_fn returned another model state than it was given: 'count' was float32[] and becomes absent.", "and dtypes stay the same over all steps. Return the whole new state, cast where needed."), STATEFUL + "def loss_fn(params, state, batch, key): return sk.mean(batch['x'] @ params['w']), {}, None"),
    "metrics are numbers": Case(("loss_fn returned metric 'error' as float32[]. A metric is a sk.mean, sk.sum, sk.max or sk.counts, so that it adds over replicas and steps. Write 'error': sk.mean(...).",), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'error': jnp.mean(batch['x'])}"),
    "metrics are no dict": Case(("loss_fn returned a sk.mean of shape () as its metrics. Give a dict {name: sk.mean(...)}.",), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), sk.mean(batch['x'])"),
    "metrics are nested": Case(("loss_fn returned metric 'a' as dict. A metric is a sk.mean, sk.sum, sk.max or sk.counts, so that it adds over replicas and steps. Write 'a': sk.mean(...).",), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'a': {'b': sk.mean(batch['x'])}}"),
    "metric is called loss": Case(("loss_fn returned a metric called 'loss', which is the name of its first value. Names are used once. Rename the metric.",), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {'loss': sk.mean(batch['x'])}"),
    "metric has a name that is a number": Case(("loss_fn returned a metric called 1. A name is text other than step, split, examples_per_s, step_time_s, input_wait_s, which metrics.jsonl uses itself. Rename it.",), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']), {1: sk.mean(batch['x'])}"),
    "adds two means": Case(("loss_fn: sk.mean(a) + sk.mean(b): two means with counts of their own cannot become one pair (sum,", "batch, key): return sk.mean(batch['x'] @ params['w']) + sk.mean(params['w'] ** 2)"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + sk.mean(params['w'] ** 2)"),
    "adds an array to a mean": Case(("loss_fn: a sk.mean is one number and combines with scalars only, found an array of shape (8,). Put", "loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + params['b'] ** 2"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w']) + params['b'] ** 2"),
    "takes the mean of a mean": Case(("loss_fn: sk.mean of a sk.mean: it is a mean already. Return it as it is, or give sk.mean the values.", "def loss_fn(params, batch, key): return sk.mean(sk.mean(batch['x'] @ params['w']))"), "def loss_fn(params, batch, key): return sk.mean(sk.mean(batch['x'] @ params['w']))"),
    "shapes do not fit": Case(("loss_fn cannot be traced: JAX raised TypeError:", "parameters, the data and what is computed from them have to fit together. Mend that line."), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['b'])"),
    "shapes do not broadcast": Case(("loss_fn cannot be traced: JAX raised TypeError:", "parameters, the data and what is computed from them have to fit together. Mend that line."), "def loss_fn(params, batch, key): return sk.mean(batch['y'] - batch['x'])"),
    "mask of sk.mean does not fit": Case(("loss_fn: sk.mean: where has shape (8,), the values have (2, 8). Its dims are the first of the", "batch, key): return sk.mean(batch['x'] @ params['w'], where=params['b'] > 0)"), "def loss_fn(params, batch, key): return sk.mean(batch['x'] @ params['w'], where=params['b'] > 0)"),
    "raises": Case(("loss_fn raised ValueError at", "ValueError: not today"), "def loss_fn(params, batch, key):\n    raise ValueError('not today')", exit=70),
    "asks for a missing key of the batch": Case(("loss_fn raised KeyError at", "KeyError: 'z'"), "def loss_fn(params, batch, key): return sk.mean(batch['z'] @ params['w'])", exit=70),
    "branches on a value": Case(("loss_fn cannot be traced: JAX raised TracerBoolConversionError:", "and no values. Use jnp.where or jax.lax.cond for `if`, and jnp for np, float() and int()."), "def loss_fn(params, batch, key):\n    e = batch['x'] @ params['w']\n    return sk.mean(e if e.sum() > 0 else -e)"),
    "calls numpy": Case(("loss_fn cannot be traced: JAX raised TracerArrayConversionError:", "and no values. Use jnp.where or jax.lax.cond for `if`, and jnp for np, float() and int()."), "def loss_fn(params, batch, key): return sk.mean(np.sin(batch['x'] @ params['w']))"),
    "uses the padding without an example dim": Case(("sk.mean got values of shape () while some of the 3 examples are padding. The first dim must be the", "def loss_fn(params, batch, key): return sk.mean((batch['x'] @ params['w']).sum())"), "def loss_fn(params, batch, key): return sk.mean((batch['x'] @ params['w']).sum())", config={"batch_size": "12", "data": "{remainder: mask}"}),
    "names an unknown axis": Case(("loss_fn cannot be traced: JAX raised", "parameters, the data and what is computed from them have to fit together. Mend that line."), "def loss_fn(params, batch, key): return sk.mean(jax.lax.pmean(batch['x'] @ params['w'], 'dataa'))"),
    "shards by an unknown name": Case(("loss_fn: sk.shard: unknown name 'mpl'. Known: batch, context, data, embed, expert, fsdp, heads,", "batch, key): return sk.mean(sk.shard(batch['x'] @ params['w'], 'batch', 'mpl'))"), "def loss_fn(params, batch, key): return sk.mean(sk.shard(batch['x'] @ params['w'], 'batch', 'mpl'))", config={"mesh": "{data: 2, fsdp: 2}"}),
    "reduces in the global view": Case(("sk.pmean was called outside of a per-replica step. In the global view arrays are global and nothing", "def loss_fn(params, batch, key): return sk.pmean(sk.mean(batch['x'] @ params['w']))"), "def loss_fn(params, batch, key): return sk.pmean(sk.mean(batch['x'] @ params['w']))"),
}  # fmt: skip

TRAIN_STEP = {
    "arity": Case(("train_step is defined as train_step(state), and is called as train_step(state, batch). It takes 2 positional arguments. Write def train_step(state, batch).",), "def train_step(state): return state, {}", STEP),
    "returns the state alone": Case(("train_step returned TrainState. It must return (state, metrics): the TrainState and a dict of scalars.",), "def train_step(state, batch): return state", STEP),
    "returns the parameters": Case(("train_step returned 2 values (dict, dict). It must return (state, metrics): the TrainState and a dict of scalars.",), "def train_step(state, batch): return state.params, {}", STEP),
    "returns nothing": Case(("train_step returned None. It must return (state, metrics): the TrainState and a dict of scalars.",), "def train_step(state, batch): pass", STEP),
    "returns metrics that are no dict": Case(("train_step returned 2 values (TrainState, float32[]). It must return (state, metrics): the TrainState and a dict of scalars.",), "def train_step(state, batch): return state, jnp.zeros(())", STEP),
    "returns a metric of a shape": Case(("train_step returned metric 'loss' as float32[8,4]. A metric is a sk.mean, sk.sum, sk.max or sk.counts, or a scalar. Write 'loss': sk.mean(...).",), "def train_step(state, batch): return state, {'loss': batch['x']}", STEP),
    "returns a metric that is text": Case(("train_step returned metric 'name' as str. A metric is a sk.mean, sk.sum, sk.max or sk.counts, or a scalar. Write 'name': sk.mean(...).",), "def train_step(state, batch): return state, {'loss': jnp.zeros(()), 'name': 'a'}", STEP),
    "changes a dtype": Case(("train_step changed the state: 'params/b' was float32[8] and becomes bfloat16[8]. Shapes and dtypes of the state stay the same over all steps.",), "def train_step(state, batch): return state.replace(params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)), {'loss': jnp.zeros(())}", STEP),
    "changes a shape": Case(("train_step changed the state: 'params/b' was float32[8] and becomes float32[9]. Shapes and dtypes of the state stay the same over all steps.",), "def train_step(state, batch): return state.replace(params={**state.params, 'b': jnp.zeros(9)}), {'loss': jnp.zeros(())}", STEP),
    "an unknown field of the state": Case(("train_step raised TypeError at", "TypeError: TrainState.__init__() got an unexpected keyword argument 'param'"), "def train_step(state, batch): return state.replace(param=state.params), {'loss': jnp.zeros(())}", STEP, exit=70),
    "does not use microbatches": Case(("microbatches: 2 has no effect: train_step never calls sk.value_and_grad, which is what accumulates. Use it, or set microbatches: 1.",), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"microbatches": "2"}),
    "ignores the padding": Case(("data.remainder is mask, but train_step uses neither sk.value_and_grad, sk.mean nor sk.example_mask:", "of the short batch would count as examples. Use one of them, or set data.remainder: drop."), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP, {"batch_size": "12", "data": "{remainder: mask}"}),
    "gradient of another tree": Case(("apply_gradients: the gradient lacks b. It must be a tree like the parameters (b, w). Differentiate", "return state.apply_gradients({'w': g['w']}), {'loss': loss}"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients({'w': g['w']}), {'loss': loss}", STEP),
    "value_and_grad of a plain loss": Case(("loss_fn returned float32[] as its loss. It must return sk.mean(...) or (sk.mean(...), metrics): a", "_), g = sk.value_and_grad(lambda p, b, k: error(p, b))(state.params, batch, state.key)"), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(lambda p, b, k: error(p, b))(state.params, batch, state.key)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "value_and_grad with too few arguments": Case(("sk.value_and_grad(loss_fn) was called with 2 arguments. It takes (params, batch, key), with model", "(loss, _), g = sk.value_and_grad(loss_fn)(state.params, batch)"), GRAD + "def train_step(state, batch):\n    (loss, _), g = sk.value_and_grad(loss_fn)(state.params, batch)\n    return state.apply_gradients(g), {'loss': loss}", STEP),
    "raises": Case(("train_step raised RuntimeError at", "RuntimeError: not today"), "def train_step(state, batch): raise RuntimeError('not today')", STEP, exit=70),
    "missing reduction": Case(("apply_gradients: gradient 'b' differs between the replicas of axes ['data']: the reduction is", "return state.apply_gradients(g), {'loss': sk.pmean(loss)}"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(g), {'loss': sk.pmean(loss)}", REPLICA),
    "missing reduction of a metric": Case(("train_step: metric 'loss' differs between the replicas of axes ['data']: a reduction is missing.", "What leaves a per-replica step must be the same on every replica. Apply sk.pmean to it."), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.pmean(g)), {'loss': loss}", REPLICA),
    "reduced twice": Case(("sk.pmean: leaf 'b' is already the same on every replica: it was reduced twice. Another sum would", "return state.apply_gradients(sk.pmean(sk.pmean(g))), {'loss': sk.pmean(loss)}"), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    return state.apply_gradients(sk.pmean(sk.pmean(g))), {'loss': sk.pmean(loss)}", REPLICA),
    "reduced twice by hand": Case(("lax.psum or lax.pmean: the operand at", "too large. Remove one of the two reductions (sk.value_and_grad has already reduced)."), GRAD + "def train_step(state, batch):\n    loss, g = jax.value_and_grad(error)(state.params, batch)\n    g = sk.pmean(g)\n    g = jax.lax.psum(g, ('replica', 'data'))\n    return state.apply_gradients(g), {'loss': sk.pmean(loss)}", REPLICA),
    "model axes in the per-replica view": Case(("view='replica' on a mesh with model axes ['fsdp']: a per-replica step sees whole parameters. Use only replica and data in the mesh, or the global view (sk.value_and_grad).",), GRAD + "def train_step(state, batch):\n    return state, {}", REPLICA, {"mesh": "{data: 2, fsdp: 2}"}),
}  # fmt: skip

EVAL = {
    "arity": Case(("eval_fn is defined as eval_fn(params), and is called as eval_fn(params, batch). It takes 2 positional arguments. Write def eval_fn(params, batch).",), "def eval_fn(params): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns a number": Case(("eval_fn returned float32[]. It must return a dict {name: sk.mean(...)}.",), "def eval_fn(params, batch): return jnp.mean(batch['x'])", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns plain numbers": Case(("eval_fn returned metric 'loss' as float32[]. A metric is a sk.mean, sk.sum, sk.max or sk.counts, so that it adds over replicas and steps. Write 'loss': sk.mean(...).",), "def eval_fn(params, batch): return {'loss': jnp.mean(batch['x'])}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "returns no metric": Case(("eval_fn returned an empty dict. An evaluation has at least one metric. Return {'loss': sk.mean(...)}.",), "def eval_fn(params, batch): return {}", {"eval_data": "DATA", "eval_fn": "eval_fn"}),
    "raises": Case(("eval_fn raised ValueError at", "ValueError: not today"), "def eval_fn(params, batch): raise ValueError('not today')", {"eval_data": "DATA", "eval_fn": "eval_fn"}, exit=70),
    "eval_data of other shapes": Case(("loss_fn in evaluation cannot be traced: JAX raised TypeError:", "parameters, the data and what is computed from them have to fit together. Mend that line."), "", {"eval_data": "{'x': DATA['x'][:, :3], 'y': DATA['y']}"}),
    "eval_data without a key": Case(("loss_fn in evaluation raised KeyError at", "KeyError: 'y'"), "", {"eval_data": "{'x': DATA['x']}"}, exit=70),
    "the best by a metric that is not there": Case(("checkpoint.best.metric is accuracy, and the evaluation gives loss.", "Name one of them."), "", {"eval_data": "DATA"}, {"eval": "{every_steps: 2}", "checkpoint": "{best: {metric: accuracy, mode: max}}"}),
    "only a train_step": Case(("evaluation needs Task.eval_fn or Task.loss_fn; this task has only train_step. Give eval_fn.",), "def train_step(state, batch): return state, {'loss': jnp.zeros(())}", {**STEP, "eval_data": "DATA"}),
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
