"""The GPT of about a hundred lines equals one device on every replica, fsdp and tensor mesh."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdkit.program.task import load_task
from tests.support.core_models import keep_gradient, made_once
from tests.support.core_runs import MESHES, assert_same_run, program_of, train
from tests.support.forms import slow_except

EXAMPLES = Path(__file__).parents[2] / "examples"
FAST = "data 2 x fsdp 2 x tensor 2"


@functools.cache
def minimal_gpt():
    sizes = {"width": 16, "layers": 2, "heads": 4, "context": 8, "text": "[a-d]*.py", "max_bytes": 4000}
    optimizer = keep_gradient(optax.adamw(3e-3, eps=1e-4, weight_decay=0.1))
    return made_once(load_task("minimal_gpt.py", "task", EXAMPLES, sizes), optimizer=optimizer)


@functools.cache
def one_device():
    return train(program_of(minimal_gpt()))


@pytest.mark.parametrize("mesh", slow_except([FAST], MESHES))
def test_minimal_gpt_equals_one_device(mesh):
    assert_same_run(train(program_of(minimal_gpt(), **MESHES[mesh])), one_device())


def test_a_logit_depends_on_earlier_bytes_alone(load_example):
    module = load_example("minimal_gpt")
    params = jax.tree.map(jnp.asarray, jax.device_get(minimal_gpt().init(jax.random.key(0))))
    tokens = np.arange(8, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 5] = 99
    logits = jax.jit(module.logits)
    moved = np.abs(np.asarray(logits(params, tokens)) - np.asarray(logits(params, changed))).max((0, 2)) > 0
    np.testing.assert_array_equal(moved, np.arange(8) >= 5)
    assert module.sample(params, "de", 3).startswith("de")
