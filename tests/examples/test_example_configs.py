"""The expected result in the header of each small config is what it gives."""

from pathlib import Path

import jax
import numpy as np
import pytest

import spmdkit as sk

CONFIGS = Path(__file__).parents[2] / "configs"
GPT_CONFIGS = (
    *("central_storage", "context", "data_fsdp_tensor", "pipeline", "accumulation", "fsdp", "hsdp", "mirrored"),
    *("tensor", "zero1", "zero2"),
)
PLANNED = ["gpt_1b", "llama_8b_v5p", "llama_70b_v5p"]
"""Configs of models that no test machine can train; `tests/plan` plans the small one."""
QUICK_GPT = ["steps=5", "task_args.train_bytes=50000", "task_args.eval_bytes=4160", "learning_rate=0.005"]


def run(name: str, *overrides: str) -> tuple[list[float], sk.Program, sk.TrainState]:
    """Returns (the loss of every step, the program, the last state) of a config of the repository."""
    program = sk.build(CONFIGS / f"{name}.yaml", overrides=overrides)
    state = program.init()
    losses = []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, program, state


def test_every_config_begins_with_what_it_needs():
    for path in sorted(CONFIGS.glob("*.yaml")):
        header = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
        verb = "plan" if path.stem in PLANNED else "train"
        command = "make demo" if path.stem == "demo" else f"spmdkit {verb} configs/{path.name}"
        for part in (command, "Hardware: ", "Expected: ", "Time: ", "2 CPU cores"):
            assert part in header, f"{path.name} lacks {part!r}"


def test_every_config_has_its_own_run_directory():
    directories = {sk.load_config(path).resolved_run_dir() for path in CONFIGS.glob("*.yaml")}
    assert directories == {CONFIGS.parent / "runs" / path.stem for path in CONFIGS.glob("*.yaml")}


def test_four_ways_to_train_give_the_same(load_example, capsys):
    """A loss, a global step, a step per replica and an own loop: on linear regression."""
    losses, program, state = run("linear_regression")
    loss = program.eval(state)["loss"]
    assert float(state.params["w"]) == pytest.approx(2.0, abs=0.02)
    assert float(state.params["b"]) == pytest.approx(0.0, abs=0.02)
    assert loss == pytest.approx(0.01, abs=0.003) and losses[0] > 3
    for name in ("custom_step", "per_replica"):
        other_losses, other_program, other_state = run(name)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(other_state.params["w"], state.params["w"], rtol=1e-5)
        assert other_program.eval(other_state)["loss"] == pytest.approx(loss, rel=1e-5)
    own = load_example("own_loop").main(CONFIGS / "linear_regression.yaml")
    assert float(own.params["w"]) == float(state.params["w"])
    assert f"loss {loss:.4f}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accuracy"), [("digits_cnn", 0.92), ("digits_nnx", 0.92), ("digits_equinox", 0.86)])
def test_digits_are_read_as_the_header_says(name, accuracy):
    _, program, state = run(name)
    assert program.eval(state)["accuracy"] > accuracy


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["clip", "simclr"])
def test_contrastive_negatives_are_all_on_any_mesh(loss):
    """Three steps, and an evaluation of 360 digits in batches of 128, of which 24 rows of the last one are padding."""
    short = (f"task_args.loss={loss}", "steps=3", "eval.every_steps=3", "log.every_steps=1")
    losses, program, state = run("contrastive", *short)
    expected, on_one, of_one = run("contrastive", *short, "mesh={}")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found, reference = program.eval(state), on_one.eval(of_one)
    assert found == pytest.approx(reference, rel=1e-4)
    assert found["loss"] < losses[0]


@pytest.fixture(scope="module")
def one_device():
    return run("one_device", *QUICK_GPT)


@pytest.mark.slow  # they differ by what `tests/step/test_equal_to_one_device.py` compares, with the same GPT
@pytest.mark.parametrize("name", GPT_CONFIGS)
def test_the_mesh_does_not_change_the_gpt(name, one_device):
    losses, _, _ = run(name, *QUICK_GPT)
    np.testing.assert_allclose(losses, one_device[0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(), ("mesh={fsdp: 2, expert: 4}", "layout={axes: {embed: [fsdp, expert]}, min_shard_bytes: 1}")]
)
def test_the_mesh_does_not_change_the_experts(settings):
    on_eight, program, state = run("moe", *QUICK_GPT, *settings)
    on_one, _, other_state = run("moe", *QUICK_GPT, "mesh={}")
    np.testing.assert_allclose(on_eight, on_one, rtol=1e-4)
    assert program.sizes["expert"] == 4
    for leaf, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(other_state.params), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-4)


@pytest.fixture(scope="module")
def recurrent_on_one_device():
    return run("recurrent", *QUICK_GPT, "mesh={}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "context: 2, tensor: 2, pipeline: 2",
        "fsdp: 2, context: 2, tensor: 2",
        "data: 2, context: 2, pipeline: 2",
        "replica: 2, expert: 2, tensor: 2",
    ],
)
def test_the_mesh_does_not_change_the_recurrent_model(mesh, recurrent_on_one_device):
    losses, _, _ = run("recurrent", *QUICK_GPT, f"mesh={{{mesh}}}")
    np.testing.assert_allclose(losses, recurrent_on_one_device[0], rtol=1e-4)


@pytest.mark.slow  # of the same GPT in `tests/step/test_equal_to_one_device.py`
def test_bfloat16_stays_close_to_float32(one_device):
    losses, _, state = run("bfloat16", *QUICK_GPT)
    np.testing.assert_allclose(losses, one_device[0], rtol=0.02)
    assert losses != one_device[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}


@pytest.mark.slow
def test_a_physics_informed_network_nears_the_solution():
    losses, program, state = run("pinn", "steps=300")
    assert program.form == "manual" and program.eval(state)["error"] < 0.03
    alone, _, other = run("pinn", "steps=20", "mesh={}")
    np.testing.assert_allclose(losses[:20], alone, rtol=1e-4)
    assert state.model_state["points"] == 300 * 256 and other.model_state["points"] == 20 * 256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("digits_equinox", []),
        ("digits_cnn", ["data.drop_remainder=false", "batch_size=960", "task_args.short_batches=true"]),
        ("digits_cnn", []),
        ("digits_nnx", []),
    ],
    ids=["equinox", "linen, short last batches", "linen", "nnx"],
)
def test_batch_statistics_and_dropout_are_one_devices(name, overrides):
    quick = ["steps=3", "eval.every_steps=null", "task_args.width=8", "learning_rate=0.05", *overrides]
    on_eight, program, state = run(name, *quick)
    on_one, _, other_state = run(name, *quick, "mesh={}")
    np.testing.assert_allclose(on_eight, on_one, rtol=1e-4)
    for leaf, other in zip(jax.tree.leaves(state.model_state), jax.tree.leaves(other_state.model_state), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-5)
    assert program.num_replicas == 8


@pytest.mark.slow
def test_padding_rows_do_not_touch_the_batch_statistics():
    options = ["data.drop_remainder=false", "batch_size=16", "task_args.short_batches=true", "learning_rate=0.05"]
    program = sk.build(CONFIGS / "digits_cnn.yaml", overrides=["steps=1", "eval.every_steps=null", *options])
    random = np.random.default_rng(0)
    examples = {"images": random.random((16, 8, 8, 1), np.float32), "labels": np.zeros(16, np.int32)}
    mask = np.arange(16) < 5
    states = []
    for padding in (0.0, 100.0):
        examples["images"][~mask] = padding
        states.append(program.step(program.init(), program.put(examples, mask))[0])
    for leaf, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(leaf, other)
    assert not np.allclose(states[0].model_state["batch_stats"]["BatchNorm_0"]["mean"], 0)
