"""Every mesh gives the numbers of one device: loss, every gradient leaf, parameters after five steps, evaluation."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import spmdkit as sk
from spmdkit.ops import tensor
from spmdkit.step import trace_context
from tests.support.core_models import (
    BATCH,
    MODELS,
    cnn,
    gpt,
    keep_gradient,
    kept_gradient,
    regression,
    regression_by_hand,
    regression_loss,
)
from tests.support.core_runs import (
    MESHES,
    TOLERANCE,
    assert_close,
    assert_same_run,
    leaf_errors,
    on_mesh,
    one_device,
    program_of,
    train,
)
from tests.support.forms import slow_except

FAST = [("regression", mesh, (1, 4)[number % 2]) for number, mesh in enumerate(MESHES)]
MODEL_CASES = slow_except(FAST, itertools.product(MODELS, MESHES, (1, 4)))
"""The regression runs on every mesh, with microbatches on every second one."""


@pytest.mark.parametrize(("model", "mesh", "microbatches"), MODEL_CASES)
def test_training_equals_one_device_on_every_mesh(model, mesh, microbatches):
    # Batch statistics are those of one microbatch, so the CNN's reference has as many microbatches.
    reference = one_device(model, microbatches if model == "cnn" else 1)
    assert_same_run(on_mesh(model, mesh, microbatches), reference)


@pytest.mark.slow
def test_gpt_in_row_parts_equals_one_device(monkeypatch):
    reference = one_device("gpt")
    monkeypatch.setattr(trace_context.Context, "platform", "gpu")
    monkeypatch.setattr(tensor, "PART_TOKENS", 8)
    mesh = {"fsdp": 2, "context": 2, "tensor": 2}
    program = program_of(MODELS["gpt"](), mesh=mesh, microbatches=2, remat="full")
    assert_same_run(train(program, evaluate=False), reference)


def test_gradient_loss_and_update_match_manual_computation():
    assert_same_run(one_device("regression", 4), one_device("regression", 1))
    task = regression(num_eval=0)
    program = program_of(task, **MESHES["data 2 x fsdp 2 x tensor 2"], microbatches=4, data={"shuffle": False})
    state = program.init()
    batch = {name: x[:BATCH] for name, x in task.train_data.items()}
    loss, gradient = regression_by_hand(jax.device_get(state.params), batch)
    expected = {name: np.asarray(state.params[name]) - 0.05 * gradient[name] for name in gradient}
    state, metrics = program.step(state, batch)
    np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=TOLERANCE)
    assert_close(kept_gradient(state), gradient)
    assert_close(jax.device_get(state.params), expected)


def test_random_init_is_bitwise_equal_on_every_mesh():
    def init(key):
        keys = jax.random.split(key)
        return {"w": jax.random.normal(keys[0], (16, 8)), "b": jax.random.uniform(keys[1], (8,))}

    task = dataclasses.replace(regression(num_eval=0), init=init)
    program = program_of(task)
    one = jax.device_get(program.init())
    many = jax.device_get(program_of(task, **MESHES["data 2 x fsdp 2 x tensor 2"]).init())
    jax.tree.map(np.testing.assert_array_equal, many, one)
    by_hand = jax.jit(init)(jax.random.key(program.config.seed))
    jax.tree.map(np.testing.assert_array_equal, one.params, by_hand)


# ---- short batches and evaluation sets of any size


@pytest.mark.forms(2)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["data 8", "fsdp 8 zero 2", "data 2 x fsdp 2 x tensor 2"])
def test_short_last_batch_counts_only_its_examples(mesh, microbatches):
    # 32 rows and 5: most replicas hold nothing but padding in the second step.
    task = regression(num_examples=37, num_eval=0)
    settings = {"data": {"drop_remainder": False, "shuffle": False}}
    program = program_of(task, microbatches=microbatches, **settings, **MESHES[mesh])
    state = program.init()
    for step, batch in program.batches(stop=2):
        rows = {name: x[(step - 1) * 32 : step * 32] for name, x in task.train_data.items()}
        loss, gradient = regression_by_hand(jax.device_get(state.params), rows)
        state, metrics = program.step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=TOLERANCE)
        assert_close(kept_gradient(state), gradient)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_short_last_batch_of_models_equals_one_device(model):
    task = gpt() if model == "gpt" else cnn(short_batches=True)
    short = dataclasses.replace(task, train_data={name: x[:41] for name, x in task.train_data.items()})
    settings = {"data": {"drop_remainder": False}, "microbatches": 2 if model == "gpt" else 1}
    one = train(program_of(short, **settings), evaluate=False, steps=3)
    program = program_of(short, mesh={"data": 4, "fsdp": 2} if model == "gpt" else {"data": 8}, **settings)
    assert program.form == ("mapped" if model == "gpt" else "manual")
    # Of the 32 rows of the second batch 9 are real: most replicas, and the GPT's second microbatch, have none.
    assert_same_run(train(program, evaluate=False, steps=3), one)


@pytest.mark.forms(2)
@pytest.mark.parametrize("num_examples", [1, 32, 33])
@pytest.mark.parametrize("mesh", ["data 8", "data 2 x fsdp 2 x tensor 2"])
def test_evaluation_set_of_any_size_is_exact(mesh, num_examples):
    task = regression(num_eval=num_examples)
    program = program_of(task, eval={"batch_size": 16}, **MESHES[mesh])
    state = program.init()
    params = jax.device_get(state.params)
    loss, _ = regression_by_hand(params, task.eval_data)
    worst = np.abs(task.eval_data["x"] @ params["w"] + params["b"] - task.eval_data["y"]).max(-1).mean()
    np.testing.assert_allclose(program.eval(state)["loss"], loss, rtol=TOLERANCE)
    np.testing.assert_allclose(program.eval(state)["worst"], worst, rtol=TOLERANCE)


# ---- settings of the step: each equal to one device, and each seen to do something


def test_bfloat16_on_many_devices_is_bfloat16_on_one():
    settings = {"microbatches": 4, "precision": "bfloat16"}
    one = train(program_of(regression(), **settings))
    run = train(program_of(regression(), **settings, **MESHES["data 2 x fsdp 2 x tensor 2"]))
    assert_same_run(run, one, 2e-2)
    assert "bf16" in run.hlo and {x.dtype for x in jax.tree.leaves((run.params, run.gradient))} == {np.dtype("float32")}
    exact = one_device("regression").gradient
    assert 1e-4 < max(leaf_errors(run.gradient, exact).values()) < 2e-2  # not float32, and not nonsense


def test_precision_mapping_sets_each_dtype():
    seen = {}

    def loss_fn(params, batch, key):
        seen["compute"] = (params["w"].dtype.name, batch["x"].dtype.name)
        return regression_loss(params, batch, key)

    precision = {"compute": "float32", "params": "bfloat16", "reduction": "bfloat16"}
    task = dataclasses.replace(regression(num_eval=0), loss_fn=loss_fn, optimizer=keep_gradient(optax.adam(1e-2)))
    program = program_of(task, precision=precision, mesh={"data": 8})
    run = train(program, evaluate=False, steps=2)
    assert any("psum" in line and "bf16[16,8]" in line for line in str(program.traced.jaxpr).splitlines())
    assert seen["compute"] == ("float32", "float32")
    assert {x.dtype.name for x in jax.tree.leaves(run.params)} == {"bfloat16"}
    assert_close(run.gradient, one_device("regression").gradient, 2e-2)


@pytest.mark.parametrize(("mesh", "offload"), [("data 8", ["params", "optimizer"]), ("data 2 x fsdp 4", ["optimizer"])])
def test_offloaded_state_gives_the_same_numbers(mesh, offload):
    program = program_of(regression(), ema=0.5, offload=offload, microbatches=4, **MESHES[mesh])
    state = program.init()
    kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    for step, batch in program.batches(stop=2):
        assert kinds((state.opt_state, state.ema)) == {"pinned_host"}, step
        assert kinds(state.params) == {"pinned_host" if "params" in offload else "device"}, step
        assert kinds(state.step) == {"device"}
        state, _ = program.step(state, batch)
    assert_same_run(train(program), one_device("regression"))
    assert program.evaluator.note is None  # the loss alone takes no key also with parameters on the host


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh", ["data 8", "fsdp 8 zero 2", "data 2 x fsdp 2 x tensor 2"])
def test_clipping_uses_the_global_norm(mesh):
    """SGD with rate one moves the parameters by exactly the clipped gradient."""
    task = dataclasses.replace(regression(num_eval=0), optimizer=keep_gradient(optax.sgd(1.0)))
    program = program_of(task, clip_norm=0.5, microbatches=4, **MESHES[mesh])
    before = program.init()
    start = jax.device_get(before.params)
    assert jax.tree.structure(before.opt_state) == jax.tree.structure(task.optimizer.init(start))
    for _, batch in program.batches(stop=1):
        after, _ = program.step(before, batch)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), start, jax.device_get(after.params))
    np.testing.assert_allclose(norm(moved), 0.5, rtol=1e-5)
    whole = one_device("regression").gradient
    assert norm(whole) > 1
    assert_close(moved, jax.tree.map(lambda g: g * 0.5 / norm(whole), whole))


def test_moving_average_follows_formula_and_is_evaluated():
    program = program_of(regression(), ema=0.9, eval={"params": "ema"}, **MESHES["fsdp 8 zero 3"])
    state = program.init()
    average = jax.device_get(state.params)
    for _, batch in program.batches(stop=3):
        state, _ = program.step(state, batch)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, jax.device_get(state.params))
    assert_close(jax.device_get(state.ema), average)
    loss, _ = regression_by_hand(average, regression().eval_data)
    np.testing.assert_allclose(program.eval(state)["loss"], loss, rtol=TOLERANCE)


@pytest.mark.forms(2)
@pytest.mark.parametrize("remat", ["full", "dots", "dots_no_batch", {"save": ["hidden"]}], ids=str)
@pytest.mark.parametrize("wraps", [True, False], ids=["sk.remat", "the whole loss"])
def test_rematerialisation_changes_memory_and_no_number(wraps, remat):
    def layer(h, w):
        return checkpoint_name(jnp.tanh(h @ w), "hidden")

    def loss_fn(params, batch, key):
        h, block = batch["x"], sk.remat(layer) if wraps else layer
        for w in (params["w1"], params["w2"]):
            h = block(h, w)
        return sk.mean((h**2).sum(-1) + h[:, 0])

    init = lambda key: {"w1": jnp.eye(16) * 0.5, "w2": jnp.ones((16, 16)) * 0.1}
    task = dataclasses.replace(regression(), init=init, loss_fn=loss_fn, rules=(), eval_data=None)
    settings = {"microbatches": 4, "mesh": {"data": 2}}
    plain, with_remat = program_of(task, **settings), program_of(task, remat=remat, **settings)
    assert_same_run(train(with_remat, evaluate=False, steps=1), train(plain, evaluate=False, steps=1))
    assert count_remats(plain) == 0
    assert count_remats(with_remat) == (2 if wraps else 1)


def count_remats(program):
    """Returns the number of `jax.checkpoint` regions that the backward pass of a step computes again."""
    return str(program.traced.jaxpr).count("remat2[")


def norm(tree):
    return np.sqrt(sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in jax.tree.leaves(tree)))
