"""Dtypes of a step: the average of parameters, gradients of float64, and which inputs are rounded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints, export
from spmdkit.errors import ConfigError
from tests.support.core_runs import program_of

pytestmark = pytest.mark.promotes("losses as users write them: rounded parameters times what the batch has")

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
PLAIN = {"data": {"shuffle": False}, "batch_size": 16}
BFLOAT16 = {"compute": "bfloat16", "params": "bfloat16"}


def run(program, steps):
    state = program.init()
    for _, batch in program.batches(stop=steps):
        state, metrics = program.step(state, batch)
    return state, metrics


# ---- the average of parameters


def falling():
    """Returns a task whose parameters, 256, fall by 2 in each step."""
    return sk.Task(
        lambda key: jnp.ones(16) * 256,
        lambda p, b, key: sk.mean(b.sum(-1) * 0 + p.sum()),
        optax.sgd(2.0),
        train_data=X,
        eval_data=X,
        eval_fn=lambda p, b: {"param": sk.mean(b.sum(-1) * 0 + p[0])},
    )


def test_the_average_of_bfloat16_parameters_moves(tmp_path):
    program = program_of(
        falling(), steps=10, ema=0.999, precision=BFLOAT16, eval={"params": "ema"}, mesh={"fsdp": 8}, **PLAIN
    )
    state, _ = run(program, 10)
    expected = 256.0
    for step in range(1, 11):
        expected = 0.999 * expected + 0.001 * (256 - 2 * step)
    assert state.params.dtype == jnp.bfloat16 and float(state.params[0]) == 236
    assert state.ema.dtype == jnp.float32
    np.testing.assert_allclose(state.ema, expected, rtol=1e-5)
    (placement,) = [p for p in program.layout if p.path == "ema"]
    assert placement.num_bytes == 64 and placement.axes == {"fsdp"}
    np.testing.assert_allclose(program.eval(state)["param"], expected, rtol=2**-8)

    from safetensors.numpy import load_file

    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(10, state, {})
    checkpoints.close()
    export(tmp_path / "c", None, tmp_path / "ema.safetensors", what=["ema"])
    (exported,) = load_file(tmp_path / "ema.safetensors").values()
    assert exported.dtype == np.float32
    np.testing.assert_array_equal(exported, state.ema)


# ---- gradients


def test_gradients_are_reduced_in_compute_dtype():
    reduction = lambda **precision: sk.Config(task="t.py:t", precision=precision).precision.reduction
    assert reduction() == reduction(params="bfloat16") == "float32"
    assert reduction(compute="bfloat16") == "bfloat16"
    assert reduction(params="float64") == "float64"
    assert reduction(params="float64", reduction="float32") == "float32"


def pair_task():
    """Returns a task with a sharded pair of products, whose gradients are reduced over data and over fsdp."""
    weights = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}

    def loss(p, b, key):
        y = sk.column_row_parallel(b["x"], [p["up"]], jax.nn.relu, p["down"])
        return sk.mean(jnp.square(y.astype(jnp.float32)).mean((1, 2)))

    rules = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]
    data = {"x": np.ones((16, 4, 16), np.float32)}
    return sk.Task(lambda key: weights, loss, optax.sgd(1.0), train_data=data, rules=rules)


@pytest.mark.parametrize("reduction, sent", [(None, "bf16"), ("float32", "f32")])
def test_one_dtype_of_reductions_over_all_axes(reduction, sent):
    precision = {"compute": "bfloat16"} | ({"reduction": reduction} if reduction else {})
    layout = {"min_shard_bytes": 0}
    program = program_of(
        pair_task(), steps=1, precision=precision, mesh={"data": 2, "fsdp": 2, "tensor": 2}, layout=layout, **PLAIN
    )
    ops = re.findall(
        r"stablehlo\.(all_reduce|reduce_scatter)\".*?\}\) : \(tensor<([^>]*)>", program.lowered.as_text(), re.S
    )
    of_weights = {(op, shape.rpartition("x")[2]) for op, shape in ops if shape.startswith(("8x", "16x", "32x"))}
    assert of_weights == {("all_reduce", sent), ("reduce_scatter", sent)}, ops


def test_float64_parameters_keep_float64_gradients():
    with jax.enable_x64(True):
        x = np.random.default_rng(1).normal(size=(16, 6))
        w0 = jnp.arange(6.0) / 7
        loss = lambda w, b: jnp.tanh(b @ w) ** 2
        task = sk.Task(lambda key: w0, lambda w, b, key: sk.mean(loss(w, b)), optax.sgd(1.0), train_data=x)
        precision = {"compute": "float64", "params": "float64"}
        program = program_of(task, precision=precision, mesh={"data": 8}, steps=1, **PLAIN)
        state, _ = program.step(program.init(), program.put(x))  # the reader's thread would not be in 64 bits
        expected = w0 - jax.grad(lambda w: loss(w, x).mean())(w0)
        assert np.abs(state.params - expected).max() < 1e-14
    jax.clear_caches()


# ---- inputs


def targets_task():
    """Returns a task whose metric is the mean of its targets as the loss sees them."""
    data = {"x": X, "meta": {"y": np.full(16, 1001, np.float32), "id": np.arange(16, dtype=np.int32)}}

    def loss(w, batch, key):
        error = (batch["x"] @ w).astype(jnp.float32) - batch["meta"]["y"] / 1000
        seen = {"y": sk.mean(batch["meta"]["y"]), "wide": sk.mean(jnp.full(16, batch["x"].dtype == jnp.float32) * 1.0)}
        return sk.mean(error**2), seen

    return sk.Task(lambda key: jnp.ones(6), loss, optax.sgd(0.1), train_data=data, eval_data=data)


EXACT, ROUNDED = 1001, 1000


@pytest.mark.parametrize(
    ("inputs", "y", "wide", "noted"),
    [
        (None, ROUNDED, 0, ["meta/y", "x"]),
        ("given", EXACT, 1, None),
        (["x"], EXACT, 0, None),
    ],
    ids=str,
)
def test_inputs_are_cast_as_configured_or_reported(inputs, y, wide, noted):
    precision = {"compute": "bfloat16"} | ({} if inputs is None else {"inputs": inputs})
    program = program_of(targets_task(), precision=precision, steps=1, **PLAIN)
    _, metrics = run(program, 1)
    evaluated = program.eval(program.init())
    for found in (metrics, evaluated):
        np.testing.assert_allclose(float(found["y"]), y, rtol=1e-6)
        assert float(found["wide"]) == wide
    notes = [note for note in program.notes if "round" in note]
    if noted is None:
        assert notes == []
    else:
        assert len(notes) == 1 and ", ".join(noted) in notes[0] and "precision.inputs" in notes[0]
        assert "meta/id" not in notes[0]


def test_nothing_is_said_where_no_input_is_rounded():
    assert program_of(targets_task(), steps=1, **PLAIN).notes == []
    x = X.astype(jnp.bfloat16)
    task = sk.Task(lambda key: jnp.ones(6), lambda w, b, key: sk.mean(b @ w), optax.sgd(0.1), train_data=x)
    assert program_of(task, precision="bfloat16", steps=1, **PLAIN).notes == []


def test_input_pattern_without_match_is_an_error():
    with pytest.raises(ConfigError, match=r"precision\.inputs.*'y'.*meta/y, x"):
        program_of(targets_task(), precision={"compute": "bfloat16", "inputs": ["y"]}, **PLAIN)
    with pytest.raises(ConfigError, match=r"precision\.inputs.*'meta/id'"):
        program_of(targets_task(), precision={"compute": "bfloat16", "inputs": ["x", "meta/id"]}, **PLAIN)
    with pytest.raises(ConfigError, match=r"precision\.inputs.*no effect"):
        sk.Config(task="t.py:t", precision={"inputs": "given"})


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("gven", "compute, given or a list of"),
        (["("], "a regular expression (missing )"),
    ],
    ids=str,
)
def test_bad_inputs_value_lists_valid_ones(value, rule):
    with pytest.raises(ConfigError) as error:
        sk.Config(task="t.py:t", precision={"compute": "bfloat16", "inputs": value})
    assert all(part in str(error.value) for part in ("precision.inputs: should be", rule))
