"""The GPT's own parts: its text, its windows, its layers, its sample."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from tests.support.core_runs import program_of, values_saved


@pytest.fixture
def gpt(load_example):
    return load_example("gpt")


def shape(gpt, stacked=True):
    return gpt.Shape(width=32, layers=2, heads=2, kv_heads=2, hidden=128, stacked=stacked)


@pytest.fixture
def params(gpt):
    return made(lambda key: gpt.init_params(key, shape(gpt)))


def made(init):
    """Returns the parameters of seed 0: in one compilation, not in one for each operation."""
    return jax.jit(init)(jax.random.key(0))


def logits_of(gpt, params, tokens):
    return jax.jit(lambda params, tokens: gpt.logits(params, tokens, gpt.Options()))(params, tokens)


def loss_of(task, params, batch, key=None):
    """Returns what `loss_fn` returns; a new function each time, so that nothing around it is taken from a former
    trace."""
    return jax.jit(lambda *args: task.loss_fn(*args))(params, batch, key)


@pytest.fixture
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 16)), jnp.int32)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def test_no_file_is_trained_on_and_evaluated(gpt):
    train_files, eval_files = gpt.read_files(10**9, 10**9)
    shared = set(train_files) & set(eval_files)
    assert all(len(file) < 100 for file in shared)  # empty and one-line files have equals
    assert 0.03 < len(eval_files) / len(train_files) < 0.3


@pytest.mark.slow
def test_the_text_is_fixed_and_as_long_requested(gpt):
    train_files, eval_files = gpt.read_files(100_000, 10_000)
    assert (sum(map(len, train_files)), sum(map(len, eval_files))) == (100_000, 10_000)
    assert (train_files, eval_files) == gpt.read_files(100_000, 10_000)


def test_each_byte_of_the_text_is_once_target(gpt):
    data = gpt.windows([b"abcdefg", b"hijkl"], context=3, document_masks=False)
    assert [bytes(row) for row in data["tokens"]] == [b"abcd", b"defg", b"ghij"]
    data = gpt.windows([b"abcdefg", b"hi"], context=4, document_masks=True)
    assert [bytes(row) for row in data["tokens"]] == [b"abcde", b"efg\0\0", b"hi\0\0\0"]
    assert data["num_targets"].tolist() == [4, 2, 1]


@pytest.mark.slow
def test_document_masks_keep_padding_out_of_the_loss(gpt):
    task = gpt.task(width=32, layers=1, context=16, document_masks=True, train_bytes=20_000, eval_bytes=2_000)
    params = made(task.init)
    short = int(np.argmin(task.train_data["num_targets"]))
    num_targets = int(task.train_data["num_targets"][short])
    batch = {name: array[short : short + 1].copy() for name, array in task.train_data.items()}
    loss, _ = loss_of(task, params, batch)
    batch["tokens"][:, num_targets + 1 :] = 7
    assert float(loss.count) == num_targets < 16
    assert float(loss.value) == float(loss_of(task, params, batch)[0].value)


@pytest.mark.slow
def test_stacked_and_separate_layers_are_the_same_model(gpt, params, tokens):
    separate = made(lambda key: gpt.init_params(key, shape(gpt, stacked=False)))
    np.testing.assert_array_equal(params["blocks"]["up"][1], separate["blocks"][1]["up"])
    np.testing.assert_allclose(logits_of(gpt, separate, tokens), logits_of(gpt, params, tokens), atol=1e-4)


def test_a_position_sees_nothing_after_it(gpt, params, tokens):
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 256)
    before, after = (logits_of(gpt, params, x) for x in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.allclose(before[:, 10:], after[:, 10:])


def test_rotary_scores_depend_on_distance_alone(gpt):
    rotated = jax.jit(gpt.rotary)
    drawn = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    q, k = (np.asarray(rotated(np.broadcast_to(x, (1, 10, 1, 8)), np.arange(10)))[0, :, 0] for x in drawn)
    np.testing.assert_allclose(q[7] @ k[4], q[5] @ k[2], atol=1e-5)
    assert abs(float(q[7] @ k[4] - q[7] @ k[1])) > 1e-3


def test_dropout_is_drawn_from_the_examples_key(gpt):
    @jax.jit
    def whole_and_part():
        keys, x = jax.random.split(jax.random.key(0), 4), jnp.ones((4, 100, 100))
        part = gpt.drop(x[2:, 60:], 0.25, keys[2:], jnp.arange(60, 100))
        return gpt.drop(x, 0.25, keys, jnp.arange(100)), part

    dropped, part = map(np.asarray, whole_and_part())
    assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    np.testing.assert_array_equal(part, dropped[2:, 60:])
    assert len({row.tobytes() for row in np.asarray(dropped).reshape(-1, 100)}) == 400


@pytest.mark.slow
def test_dropout_is_on_in_training_alone(gpt):
    task = gpt.task(width=32, layers=1, context=16, dropout=0.5, train_bytes=20_000, eval_bytes=2_000)
    params = made(task.init)
    batch = {name: array[:4] for name, array in task.train_data.items()}
    values = []
    for key in (None, None, jax.random.key(0)):
        with sk.examples(4, key=jax.random.key(0)):
            values.append(float(loss_of(task, params, batch, key)[0].value))
    assert values[0] == values[1] != values[2]


@pytest.mark.slow
def test_a_mixture_reports_its_load(gpt):
    args = {"width": 32, "layers": 2, "context": 16, "train_bytes": 20_000, "eval_bytes": 2_000}
    task = gpt.task(**args, moe={"experts": 4, "top_k": 2, "capacity": 1.0, "balance_loss": 0.5, "z_loss": 0.0})
    params = made(task.init)
    batch = {name: array[:4] for name, array in task.train_data.items()}
    loss, metrics = loss_of(task, params, batch)
    assert float(metrics["balance"].value) >= 1 - 1e-5 and 0 < float(metrics["dropped"].value) < 1
    expected = float(metrics["bits_per_byte"].value) * np.log(2) + 0.5 * float(metrics["balance"].value)
    assert float(loss.value) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_loss_is_in_nats_and_bits_per_byte(gpt):
    task = gpt.task(width=32, layers=1, context=16, dropout=0.1, train_bytes=20_000, eval_bytes=2_000)
    params = jax.tree.map(jnp.zeros_like, made(task.init))
    batch = {name: array[:4] for name, array in task.train_data.items()}
    with sk.examples(4, key=jax.random.key(0)):
        loss, metrics = loss_of(task, params, batch, jax.random.key(0))
    assert float(loss.value) == pytest.approx(np.log(256))
    assert float(metrics["bits_per_byte"].value) == pytest.approx(8)


def test_unigram_loss_of_two_bytes_is_log_two(gpt):
    assert gpt.unigram_loss([b"ab" * 100_000], [b"abba"]) == pytest.approx(np.log(2), abs=0.01)


@pytest.mark.slow
def test_a_sample_continues_its_prompt(gpt, params):
    text = gpt.sample(params, "def ", num_bytes=20, context=8)
    assert text.startswith("def ") and len(text.encode()) >= 24
    assert text == gpt.sample(params, "def ", num_bytes=20, context=8)


@pytest.mark.slow
def test_a_cold_sample_repeats_what_was_learned(gpt):
    task = gpt.task(width=32, layers=1, context=8, train_bytes=20_000, eval_bytes=2_000)
    params = made(task.init)
    text = b"abcabcabcabcabcabc"
    batch = {"tokens": np.frombuffer(text[:9], np.uint8)[None], "num_targets": np.array([8], np.int32)}
    grad = jax.jit(jax.grad(lambda p: task.loss_fn(p, batch, None)[0].value))
    for _ in range(60):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grad(params))
    assert gpt.sample(params, "abc", 9, context=8, temperature=0.1) == "abcabcabcabc"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    ["{fsdp: 2, context: 2, tensor: 2}", "{data: 2, pipeline: 2, tensor: 2}", "{replica: 2, fsdp: 2, tensor: 2}"],
)
def test_its_marks_offload_on_meshes_that_shard_it(mesh):
    config = Path(__file__).parents[2] / "configs/verify/gpt.yaml"
    asked = [f"mesh={mesh}", "remat={save: [attention], offload: [hidden]}", "--no-mutants", "--json"]
    command = [sys.executable, "-m", "spmdkit", "verify", str(config), *asked]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["passed"]


def test_remat_policies_find_their_values(gpt):
    task = gpt.task(width=32, layers=3, heads=2, context=16, train_bytes=20_000, eval_bytes=2_000)
    program = program_of(task, remat="minimal_flash", batch_size=4, learning_rate=1e-3)
    x, by_head, hidden, lse = (4, 16, 32), (4, 16, 2, 16), (4, 16, 128), (4, 16, 2)
    assert values_saved(program) == {(x, False): 2, (by_head, False): 4, (hidden, False): 1, (lse, False): 1}
