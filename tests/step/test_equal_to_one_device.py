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
from spmdkit.mesh.mesh import resolve
from tests.support.core_hlo import collectives
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
    ZERO_2_BESIDE_DATA,
    assert_close,
    assert_same_run,
    leaf_errors,
    on_mesh,
    one_device,
    program_of,
    train,
)
from tests.support.forms import slow_except

FAST = [
    *itertools.product(["regression"], MESHES, (1, 4)),
    ("gpt", "data 2 x fsdp 2 x tensor 2", 1),
    ("gpt", "fsdp 8 zero 2", 4),
    ("gpt", "tensor 4 x data 2", 4),
    ("gpt", "data 2 x fsdp 4", 4),
    ("cnn", "data 8", 1),
    ("cnn", "data 2 x fsdp 2 x tensor 2", 4),
    ("cnn", "fsdp 8 zero 2", 4),
]
MODEL_CASES = slow_except(FAST, itertools.product(MODELS, MESHES, (1, 4)))
"""The regression runs on every mesh with and without microbatches; the larger models on one mesh of each kind."""


@pytest.mark.parametrize(("model", "mesh", "microbatches"), MODEL_CASES)
def test_training_equals_one_device_on_every_mesh(model, mesh, microbatches):
    # Batch statistics are those of one microbatch, so the CNN's reference has as many microbatches.
    reference = one_device(model, microbatches if model == "cnn" else 1)
    assert_same_run(on_mesh(model, mesh, microbatches), reference)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero_2_with_data_axis_equals_one_device(microbatches):
    program = program_of(regression(), microbatches=microbatches, **ZERO_2_BESIDE_DATA)
    assert_same_run(train(program), one_device("regression"))


@pytest.mark.forms(2)
@pytest.mark.parametrize(("mesh", "microbatches"), [form[1:] for form in FAST if form[0] == "gpt"])
def test_gpt_reduces_gradient_once_outside_the_loop(mesh, microbatches):
    settings = MESHES[mesh]
    found = collectives(on_mesh("gpt", mesh, microbatches).hlo, resolve(settings["mesh"], 8))
    if "fsdp" in mesh and settings.get("layout", {}).get("zero") in (1, 2):
        assert not any(c.in_loop for c in found)  # there fsdp is a replica axis
    over_replicas = [(c.kind, c.in_loop) for c in found if c.axes & {"replica", "data"}]
    assert over_replicas == [("all-reduce", False)] * ("data" in mesh)


def test_accumulation_on_one_device_changes_nothing():
    assert_same_run(one_device("regression", 4), one_device("regression", 1))


def test_gradient_loss_and_update_match_manual_computation():
    task = regression()
    program = program_of(task, **MESHES["data 2 x fsdp 2 x tensor 2"], microbatches=4, data={"shuffle": False})
    state = program.init()
    batch = {name: x[:BATCH] for name, x in task.train_data.items()}
    loss, gradient = regression_by_hand(jax.device_get(state.params), batch)
    expected = {name: np.asarray(state.params[name]) - 0.05 * gradient[name] for name in gradient}
    state, metrics = program.step(state, batch)
    np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=TOLERANCE)
    assert_close(kept_gradient(state), gradient)
    assert_close(jax.device_get(state.params), expected)


@pytest.mark.parametrize("mesh", ["fsdp 8 zero 3", "data 2 x fsdp 2 x tensor 2"])
def test_random_init_is_bitwise_equal_on_every_mesh(mesh):
    def init(key):
        keys = jax.random.split(key)
        return {"w": jax.random.normal(keys[0], (16, 8)), "b": jax.random.uniform(keys[1], (8,))}

    task = dataclasses.replace(regression(), init=init)
    program = program_of(task)
    one = jax.device_get(program.init())
    many = jax.device_get(program_of(task, **MESHES[mesh]).init())
    jax.tree.map(np.testing.assert_array_equal, many, one)
    by_hand = jax.jit(init)(jax.random.key(program.config.seed))
    jax.tree.map(np.testing.assert_array_equal, one.params, by_hand)


# ---- short batches and evaluation sets of any size
# ---------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["data 8", "fsdp 8 zero 2", "data 2 x fsdp 2 x tensor 2"])
def test_short_last_batch_counts_only_its_examples(mesh, microbatches):
    task = regression(num_examples=37)  # 32 and 5: most replicas hold nothing but padding in the second step
    settings = {"data": {"drop_remainder": False, "shuffle": False}}
    program = program_of(task, microbatches=microbatches, **settings, **MESHES[mesh])
    state = program.init()
    for step, batch in program.batches(stop=2):
        rows = {name: x[(step - 1) * 32 : step * 32] for name, x in task.train_data.items()}
        loss, gradient = regression_by_hand(jax.device_get(state.params), rows)
        state, metrics = program.step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=TOLERANCE)
        assert_close(kept_gradient(state), gradient)


@pytest.mark.forms(1)
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


@pytest.mark.forms(4)
@pytest.mark.parametrize("num_examples", [1, 7, 32, 33, 50])
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
# ------------------------------------


def test_bfloat16_keeps_parameters_and_sums_in_float32():
    """Tolerance 3e-2 on the gradient: numbers of 8 bits, through two layers."""
    program = program_of(gpt(), microbatches=4, precision="bfloat16", **MESHES["data 2 x fsdp 2 x tensor 2"])
    run, reference = train(program, evaluate=False), one_device("gpt")
    assert "bf16" in run.hlo
    assert all(x.dtype == np.float32 for x in jax.tree.leaves((run.params, run.gradient)))
    np.testing.assert_allclose(run.losses, reference.losses, rtol=5e-3)
    errors = leaf_errors(run.gradient, reference.gradient)
    assert 1e-4 < max(errors.values()) < 3e-2, errors  # not float32, and not nonsense
    assert_close(run.params, reference.params, 3e-2)


def test_bfloat16_on_many_devices_is_bfloat16_on_one():
    settings = {"microbatches": 4, "precision": "bfloat16"}
    one = train(program_of(regression(), **settings))
    assert_same_run(train(program_of(regression(), **settings, **MESHES["data 2 x fsdp 2 x tensor 2"])), one, 2e-2)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 4}], ids=["one device", "data 2 x fsdp 4"])
def test_precision_mapping_sets_each_dtype(mesh):
    seen = {}

    def loss_fn(params, batch, key):
        seen["compute"] = (params["w"].dtype.name, batch["x"].dtype.name)
        return regression_loss(params, batch, key)

    precision = {"compute": "float32", "params": "bfloat16", "reduce": "bfloat16"}
    task = dataclasses.replace(regression(), loss_fn=loss_fn, optimizer=keep_gradient(optax.adam(1e-2)))
    run = train(program_of(task, precision=precision, mesh=mesh), evaluate=False, steps=2)
    assert seen["compute"] == ("float32", "float32")
    assert {x.dtype.name for x in jax.tree.leaves(run.params)} == {"bfloat16"}
    assert_close(run.gradient, one_device("regression").gradient, 2e-2)


def test_gradients_are_summed_in_the_reduce_dtype():
    program = program_of(regression(), mesh={"data": 8}, precision={"reduce": "bfloat16"})
    sums = [line for line in str(program.traced.jaxpr).splitlines() if "psum" in line and "bf16[16,8]" in line]
    assert sums, "no psum of the gradient in bfloat16"
    assert_close(train(program, evaluate=False).gradient, one_device("regression").gradient, 2e-2)


@pytest.mark.parametrize("mesh", ["data 8", "data 2 x fsdp 4"])
def test_offloaded_state_gives_the_same_numbers(mesh):
    settings = {"offload": ["params", "optimizer"], "microbatches": 4}
    task = dataclasses.replace(regression(), optimizer=keep_gradient(optax.sgd(0.05, momentum=0.9)))
    program = program_of(task, ema=0.5, **settings, **MESHES[mesh])
    state = program.init()
    kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    for step, batch in program.batches(stop=2):
        assert kinds((state.params, state.opt_state, state.ema)) == {"pinned_host"}, step
        assert kinds(state.step) == {"device"}
        state, _ = program.step(state, batch)
    many = train(program)
    one = train(program_of(task, ema=0.5, microbatches=4))
    assert_same_run(many, one)


def test_evaluation_of_offloaded_parameters_draws_nothing():
    """The GPT has dropout, and none where its key is None: with a key after all, its evaluation would be another
    one."""
    assert program_of(gpt(), offload=["params"], **MESHES["data 2 x fsdp 4"]).evaluator.note is None


def test_only_optimizer_state_can_be_offloaded():
    program = program_of(regression(), offload=["optimizer"], **MESHES["data 2 x fsdp 4"])
    kinds = {p.path.split("/")[0]: p.memory_kind for p in program.layout if p.shape}
    assert kinds["params"] == "device" and kinds["opt_state"] == "pinned_host"
    assert_same_run(train(program), one_device("regression"))


@pytest.mark.parametrize("mesh", ["data 8", "fsdp 8 zero 2", "data 2 x fsdp 2 x tensor 2"])
def test_clipping_uses_the_global_norm(mesh):
    """SGD with rate one moves the parameters by exactly the clipped gradient."""
    task = dataclasses.replace(regression(), optimizer=keep_gradient(optax.sgd(1.0)))
    program = program_of(task, clip_norm=0.5, microbatches=4, **MESHES[mesh])
    before = program.init()
    start = jax.device_get(before.params)
    for _, batch in program.batches(stop=1):
        after, _ = program.step(before, batch)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), start, jax.device_get(after.params))
    np.testing.assert_allclose(norm(moved), 0.5, rtol=1e-5)
    whole = one_device("regression").gradient
    assert norm(whole) > 1
    assert_close(moved, jax.tree.map(lambda g: g * 0.5 / norm(whole), whole))


@pytest.mark.parametrize("mesh", ["data 8", "fsdp 8 zero 3"])
def test_moving_average_follows_formula_and_is_evaluated(mesh):
    program = program_of(regression(), ema=0.9, eval={"params": "ema"}, **MESHES[mesh])
    state = program.init()
    average = jax.device_get(state.params)
    for _, batch in program.batches(stop=3):
        state, _ = program.step(state, batch)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, jax.device_get(state.params))
    assert_close(jax.device_get(state.ema), average)
    loss, _ = regression_by_hand(average, regression().eval_data)
    np.testing.assert_allclose(program.eval(state)["loss"], loss, rtol=TOLERANCE)


@pytest.mark.forms(3)
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


def test_rematerialized_gpt_equals_one_device_without():
    program = program_of(gpt(), remat="dots", microbatches=4, **MESHES["data 2 x fsdp 4"])
    assert_same_run(train(program, evaluate=False), one_device("gpt"))


def norm(tree):
    return np.sqrt(sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in jax.tree.leaves(tree)))
