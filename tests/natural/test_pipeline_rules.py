"""The pipeline of docs/howto/pipelines.md: one rule with the leading dim, for a stack of matrices and vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, STEPS, assert_same_run, keep_gradient, train

TOKENS = np.random.default_rng(0).integers(0, 11, size=(BATCH * STEPS, 6), dtype=np.int32)
LEADING = [["blocks/.*", ["layers"]]]
EVERY_DIM = [["blocks/w", ["layers", None, None]], ["blocks/b", ["layers"]]]


def init(key):
    blocks = {"w": normal(1, 4, 8, 8) / 3, "b": jnp.zeros((4, 8))}
    return {"embed": normal(0, 11, 8), "blocks": blocks, "head": normal(2, 8, 11) / 3}


def loss_fn(params, batch, key):
    embed = lambda params, rows: params[rows[:, :-1]]
    layer = lambda x, weights, rows: x + jnp.tanh(x @ weights["w"] + weights["b"])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    head = lambda x, params, rows: sk.mean(cross_entropy(x @ params, rows[:, 1:]).mean(-1))
    return sk.pipeline(embed, layer, head)(params["embed"], params["blocks"], params["head"], batch)


def run_on(mesh, rules):
    task = sk.Task(init, loss_fn, keep_gradient(optax.adam(0.01)), train_data=TOKENS)
    pipeline = {"pipeline": {"schedule": "1f1b", "microbatches": 4}} if mesh else {}
    return train(task, mesh, layout={"rules": rules}, **pipeline)


MESHES = {"pipeline 4": {"pipeline": 4}, "data 2 x pipeline 2": {"data": 2, "pipeline": 2}}


@pytest.mark.parametrize("mesh", slow_except(["data 2 x pipeline 2"], MESHES))
def test_one_rule_shards_the_layers_of_every_array(mesh):
    program, run = run_on(MESHES[mesh], LEADING)
    specs = {placed.path: placed.spec for placed in program.layout}
    assert specs["params/blocks/w"] == specs["params/blocks/b"] == jax.sharding.PartitionSpec("pipeline")
    assert_same_run(run, run_on({}, EVERY_DIM)[1])
