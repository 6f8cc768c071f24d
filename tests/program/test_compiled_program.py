"""What XLA makes of a step: one fused reduction over the replicas, none in the loop, one compilation, no second
copy."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.core_hlo import collectives, over
from tests.support.core_runs import MESHES, program_of


def mlp_loss(params, batch, key):
    h = jax.nn.relu(sk.shard(batch["x"] @ params["up"], "batch", "mlp"))
    error = h @ params["down"] + params["bias"] - batch["y"]
    return sk.mean((error**2).sum(-1)), {"size": sk.mean(jnp.abs(error).sum(-1))}


def mlp(**changes):
    shapes = {"up": (16, 64), "down": (64, 16), "bias": (16,)}
    x = np.linspace(-1, 1, 128 * 16, dtype=np.float32).reshape(128, 16)
    return sk.Task(
        init=lambda key: {name: jnp.full(shape, 0.01) for name, shape in shapes.items()},
        loss_fn=mlp_loss,
        optimizer=optax.adam(1e-2),
        train_data={"x": x, "y": x**2},
        eval_data={"x": x[:50], "y": x[:50]},
        rules=[("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])],
        **changes,
    )


def collectives_of(program):
    return collectives(program.compiled.as_text(), program.sizes)


def test_manual_form_has_one_all_reduce_outside_loop():
    program = program_of(mlp(), microbatches=4, clip_norm=1.0, ema=0.9, **MESHES["replica 2 x data 4"])
    found = collectives_of(program)
    assert program.form == "manual"
    assert len(found) == 1 and found[0].kind == "all-reduce" and not found[0].in_loop, found
    assert found[0].axes == {axis for axis, size in program.sizes.items() if size > 1}


@pytest.mark.forms(1)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["data 8", "data 2 x fsdp 4"])
def test_only_counts_that_need_data_are_sent(mesh, microbatches):
    def weighted_loss(params, batch, key):
        error = (batch["x"] @ params["up"] @ params["down"] - batch["y"]) ** 2
        return sk.mean(error.sum(-1), weights=jnp.exp(batch["x"][:, 0])), {"size": sk.mean(error.sum(-1))}

    def scalars_sent(task):
        found = over(collectives_of(program_of(task, microbatches=microbatches, **MESHES[mesh])), "data")
        return sum(c.line.count("dims=()") for c in found)

    assert scalars_sent(mlp()) == 2, "the sums of loss and metric"
    assert scalars_sent(dataclasses.replace(mlp(), loss_fn=weighted_loss)) == 3, "and the sum of the weights"


@pytest.mark.forms(1)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["data 2 x fsdp 4", "tensor 4 x data 2", "data 2 x fsdp 2 x tensor 2"])
def test_mapped_form_reduces_replicas_once_outside_loop(mesh, microbatches):
    program = program_of(mlp(), microbatches=microbatches, **MESHES[mesh])
    found = collectives_of(program)
    assert program.form == "mapped"
    over_replicas = [c for c in found if c.axes & {"replica", "data"}]
    assert [(c.kind, c.axes, c.in_loop) for c in over_replicas] == [("all-reduce", {"data"}, False)]
    assert over(found, "fsdp", "tensor"), "the partitioner has its own collectives over the model axes"


def test_zero_decides_what_goes_over_fsdp():
    kinds = {}
    for zero in (1, 2, 3):
        found = collectives_of(program_of(mlp(), mesh={"fsdp": 8}, layout={"zero": zero}, microbatches=4))
        kinds[zero] = collections.Counter((c.kind, c.in_loop) for c in found)
    assert kinds[1]["all-reduce", False] == 1 and not any("reduce-scatter" in key for key in kinds[1])
    assert kinds[2]["reduce-scatter", False] >= 1
    for zero in (1, 2):  # whole parameters: gathered after the update, nothing in the loop
        assert kinds[zero]["all-gather", False] >= 1
        assert not any(in_loop for _, in_loop in kinds[zero])
    assert any(kind == "all-gather" for kind, _ in kinds[3]), "weights are gathered where they are used"


def test_zero_2_reduces_only_shards_over_data():
    found = collectives_of(program_of(mlp(), mesh={"data": 2, "fsdp": 4}, layout={"zero": 2}, microbatches=4))
    assert over(found, "fsdp", kind="reduce-scatter") and not any(c.in_loop for c in found)
    assert not over(found, "data", kind="reduce-scatter")
    assert 1 <= len(over(found, "data")) <= 2  # the shards over data, the sums of the loss over both


@pytest.fixture
def compilations():
    """The names of what XLA compiles while a test runs."""
    seen = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_steps_and_evaluations_compile_once_each(compilations):
    task = mlp()
    program = program_of(task, microbatches=4, data={"drop_remainder": False}, **MESHES["fsdp 8 zero 2"])
    state = program.init()
    compilations.clear()
    for _, batch in program.batches(stop=2):
        state, _ = program.step(state, batch)
    assert len(compilations) == 1, "128 rows: no batch is short, and nothing looks for padding"
    program.eval(state)
    assert compilations.count("jit(evaluate)") == 1, "the short batch is filled in two ways for the same program"
    num = len(compilations)
    assert num <= 4, compilations
    for _, batch in program.batches(start=3, stop=5):
        state, _ = program.step(state, batch)
    state, metrics = program.step(state, {name: x[:32] for name, x in task.train_data.items()})
    program.eval(state)
    program.eval(state)
    float(metrics["loss"])
    assert len(compilations) == num, compilations[num:]


def test_donated_state_leaves_no_second_copy():
    program = program_of(mlp(), ema=0.9, microbatches=4, **MESHES["fsdp 8 zero 1"])
    state = program.init()
    one_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    memory = program.compiled.memory_analysis()
    assert memory.alias_size_in_bytes == one_device
    old = jax.tree.leaves(state)
    for _, batch in program.batches(stop=1):
        program.step(state, batch)
    assert all(leaf.is_deleted() for leaf in old)
