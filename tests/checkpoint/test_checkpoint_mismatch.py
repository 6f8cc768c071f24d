"""A checkpoint of another model is refused before anything is read, by the paths of its leaves."""

import jax
import jax.numpy as jnp
import pytest

from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import CheckpointError
from tests.support.checkpoint_states import train_state


def refusal(directory, saved, asked):
    checkpoints = Checkpoints(directory)
    checkpoints.save(40, saved, {})
    checkpoints.wait()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(40, jax.eval_shape(lambda: asked))
    checkpoints.close()
    assert caught.value.exit_code == 79
    return str(caught.value)


def test_mismatch_names_leaves_both_shapes_and_repair(directory):
    text = refusal(directory, train_state(width=16), train_state(width=32))
    assert f"restoring {directory}/40 into this task's state: 12 leaves differ" in text
    assert "params/blocks/0/kernel: saved float32[8,16], requested float32[8,32]" in text
    assert text.count("\n  ") == 6 and "and 7 more" in text
    assert "set run_dir to a new folder" in text


@pytest.mark.parametrize(("saved", "asked"), [("float32", "int32"), ("float32", "bfloat16"), ("int32", "uint32")])
def test_another_dtype_is_never_cast_in_silence(directory, saved, asked):
    text = refusal(directory, {"w": jnp.ones(3, saved)}, {"w": jnp.ones(3, asked)})
    assert f"w: saved {saved}[3], requested {asked}[3]" in text


def test_missing_and_extra_leaves_are_named(directory):
    text = refusal(directory, {"a": jnp.ones(1), "old": jnp.ones(2)}, {"a": jnp.ones(1), "new": jnp.ones((2, 3))})
    assert "new: not in the checkpoint, requested float32[2,3]" in text
    assert "old: saved float32[2], not requested" in text


def test_empty_leaves_and_keys_are_compared(directory):
    saved = {"k": jax.random.key(0), "e": jnp.zeros((0, 2))}
    text = refusal(directory, saved, {"k": jax.random.key(0, impl="rbg"), "e": jnp.zeros((0, 3))})
    assert "e: saved float32[0,2], requested float32[0,3]" in text
    assert "k: saved key<fry>[], requested key<rbg>[]" in text


@pytest.mark.parametrize("steps", [[], [3, 20]])
def test_missing_step_error_lists_existing_steps(directory, steps):
    checkpoints = Checkpoints(directory)
    for step in steps:
        checkpoints.save(step, {"w": jnp.ones(1)}, {})
    checkpoints.wait()
    with pytest.raises(CheckpointError, match="Request step 20" if steps else "holds no checkpoint.*Train first"):
        checkpoints.restore(7, {"w": jax.ShapeDtypeStruct((1,), jnp.float32)})
    checkpoints.close()
