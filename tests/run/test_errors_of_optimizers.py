"""Errors of an optimizer or a schedule are errors of the user's program, with exit code 70 and the user's line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import UserCodeError
from spmdkit.faults.exit_handler import describe
from tests.support.core_runs import program_of

X = np.ones((8, 3), np.float32)
MASK_OF_ALL = {"a": optax.adamw(1e-3, mask=lambda p: {k: v.ndim > 1 for k, v in p.items()}), "b": optax.sgd(1.0)}


def custom(update, init=lambda params: ()):
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            optax.multi_transform(MASK_OF_ALL, {"w": "a", "b": "b"}),
            r"the optimizer's init raised AttributeError at .*test_errors_of_optimizers.py:\d+: 'MaskedNode'",
        ),
        (optax.masked(optax.sgd(0.1), {"w": True}), "the optimizer's init raised ValueError.*: pytree structure"),
        (custom(lambda g, s, p=None: (g, s), lambda p: {"name": "x"}), "init returned str at 'name'"),
        (optax.adam(lambda step: 1 / 0), r"update \(or its schedule\) raised ZeroDivisionError at .*test_errors_of"),
        (optax.sgd(lambda step: 0.1 if step < 9 else 0.01), r"raised TracerBoolConversionError at .*\n.*jnp\.where"),
        (custom(lambda g, s, p=None: ({"w": g["w"]}, s)), "another structure than the parameters: b missing"),
        (custom(lambda g, s, p=None: None), r"update returned NoneType\. It must return \(updates, state\)"),
    ],
    ids=["init", "optax", "state", "schedule", "branch", "leaf", "result"],
)
def test_optimizer_is_named_with_the_line(optimizer, words):
    init = lambda key: {"w": jnp.ones((3, 3)), "b": jnp.ones(3)}
    task = sk.Task(init, lambda p, x, key: sk.mean((x @ p["w"] + p["b"]).sum(-1)), optimizer, X)
    with pytest.raises(UserCodeError, match=words) as caught:
        program_of(task, batch_size=8)
    assert caught.value.exit_code == 70


@pytest.mark.parametrize(
    "text",
    [
        "INTERNAL: Failed to allocate 98697216 bytes for new constant",
        "INTERNAL: Failed to allocate memory: 12",
        "RESOURCE_EXHAUSTED: Failed to allocate request for 12.00GiB (12884901888B) on device ordinal 0",
        "RESOURCE_EXHAUSTED: Attempting to reserve 5.33G at the bottom of memory. That was not possible.",
        "INTERNAL: Ran out of memory in hbm. Used 20.50G of 15.75G hbm.",
        "INTERNAL: CUDA error: CUDA_ERROR_OUT_OF_MEMORY",
        "UNKNOWN: hipErrorOutOfMemory",
        "INTERNAL: cuBLAS: CUBLAS_STATUS_ALLOC_FAILED",
        "INTERNAL: mmap failed: Cannot allocate memory",
        "UNKNOWN: std::bad_alloc",
    ],
)
def test_every_text_of_exhausted_memory_is_recognized(text):
    code, words = describe(jax.errors.JaxRuntimeError(text))
    assert code == 70 and words.startswith("out of memory") and text.split(": ")[1][:20] in words


@pytest.mark.parametrize("text", ["INTERNAL: no kernel", "RESOURCE_EXHAUSTED: Received message larger than max"])
def test_other_errors_of_xla_are_not_about_memory(text):
    assert "out of memory" not in describe(jax.errors.JaxRuntimeError(text))[1]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["RESOURCE_EXHAUSTED", "INTERNAL: Error dispatching computation"])
def test_exhausted_memory_is_no_bug_of_spmdkit(wrapped, kind):
    error = jax.errors.JaxRuntimeError(f"{kind}: Out of memory allocating 6912010820 bytes.\nmore")
    if wrapped:
        outer = UserCodeError("init raised JaxRuntimeError")
        outer.__cause__, error = error, outer
    code, text = describe(error)
    assert code == 70 and "out of memory" in text and "6.4 GiB more" in text and "microbatches" in text
    assert "bug" not in text and describe(MemoryError("no"))[0] == 70
