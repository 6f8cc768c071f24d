"""`sk.pipeline`: every schedule gives the numbers of one device on every mesh and idles as its formula says; errors."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops.pipeline.parts import join, split
from spmdkit.ops.pipeline.schedule import StageSchedule
from spmdkit.plan.flops import count
from tests.support.core_runs import BATCH, assert_same_run, program_of, train
from tests.support.pipeline_models import embed, head, make_layer, model, model_of_ops, plain_mlp

SHORT_BATCHES = {"data": {"drop_remainder": False}}


@pytest.fixture(scope="module")
def one_device():
    return train(program_of(model(), **SHORT_BATCHES))


def assert_equal_to_one_device(one_device, mesh, schedule, task=None, tolerance=1e-5, evaluate=True, **settings):
    program = program_of(task or model(), mesh=mesh, pipeline={"schedule": schedule}, **SHORT_BATCHES, **settings)
    assert_same_run(train(program, evaluate), one_device, tolerance)


MESHES = {
    "pipeline 4 x data 2": {"pipeline": 4, "data": 2},
    "pipeline 2 x fsdp 2 x tensor 2": {"pipeline": 2, "fsdp": 2, "tensor": 2},
    "pipeline 2 x data 2 x fsdp 2": {"pipeline": 2, "data": 2, "fsdp": 2},
    "pipeline 2 x replica 2 x expert 2": {"pipeline": 2, "replica": 2, "expert": 2},
    "pipeline 2 x context 2 x data 2": {"pipeline": 2, "context": 2, "data": 2},
    "pipeline 8": {"pipeline": 8},
}


@pytest.mark.parametrize(
    ("schedule", "num", "more"),
    [
        ("1f1b", BATCH, {}),
        ("gpipe", 4, {}),
        pytest.param("1f1b", 2, {"microbatches": 2, "remat": "full"}, marks=pytest.mark.slow),
    ],
)
def test_a_small_pipeline_is_one_device(schedule, num, more):
    """With microbatches of one row the head is sharded by tokens, with larger ones by rows."""
    small = model(layers=2, dropout=bool(more), head_per_token=True)
    reference = train(program_of(small), evaluate=False, steps=1)
    program = program_of(small, mesh={"pipeline": 2}, pipeline={"schedule": schedule, "microbatches": num}, **more)
    assert_same_run(train(program, evaluate=False, steps=1), reference)


@pytest.mark.slow
def test_a_head_cut_by_tokens_is_one_device(one_device):
    task = model(head_per_token=True)
    assert_equal_to_one_device(one_device, {"pipeline": 8}, "1f1b", task=task, microbatches=2, evaluate=False)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_schedule_on_every_mesh_is_one_device(mesh, schedule, microbatches, one_device):
    sizes = MESHES[mesh]
    task = model(layers=16) if sizes["pipeline"] == 8 and schedule == "interleaved" else model(manual="tensor" in sizes)
    reference = one_device if task is not model(layers=16) else train(program_of(task, **SHORT_BATCHES))
    assert_equal_to_one_device(reference, sizes, schedule, task=task, microbatches=microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(
    "settings",
    [
        {"layout": {"zero": 1}},
        {"layout": {"zero": 2}, "microbatches": 2},
        {"remat": "dots", "clip_norm": 0.1},
        {"remat": "full", "offload": ["params"]},
    ],
    ids=str,
)
def test_pipeline_composes_with_other_settings(settings, schedule):
    mesh = {"pipeline": 2, "data": 2, "fsdp": 2}
    whole = {name: x for name, x in settings.items() if name in ("clip_norm",)}
    reference = train(program_of(model(), **whole, **SHORT_BATCHES))
    assert_equal_to_one_device(reference, mesh, schedule, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_bfloat16_pipeline_equals_bfloat16_one_device(schedule):
    run = lambda **settings: train(
        program_of(model(), precision="bfloat16", **SHORT_BATCHES, **settings), evaluate=False
    )
    reference = run()
    found = run(mesh={"pipeline": 4, "data": 2}, pipeline={"schedule": schedule})
    hits = {"accuracy": reference.metrics["accuracy"]}  # two logits may be equal in bfloat16, and either wins
    assert_same_run(found._replace(metrics=found.metrics | hits), reference, 2e-2)


OPS = {
    "pipeline 2 x expert 2 x tensor 2": {"pipeline": 2, "expert": 2, "tensor": 2},
    "pipeline 2 x expert 2 x data 2": {"pipeline": 2, "expert": 2, "data": 2},
    "pipeline 2 x context 2 x tensor 2": {"pipeline": 2, "context": 2, "tensor": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("mesh", OPS)
def test_the_other_ops_work_inside_of_stages(mesh, schedule):
    reference = train(program_of(model_of_ops()), evaluate=False)
    program = program_of(model_of_ops(), mesh=OPS[mesh], pipeline={"schedule": schedule})
    assert_same_run(train(program, evaluate=False), reference)


# ---- the tables

SHAPES = {
    "num_stages": st.integers(2, 4),
    "num_chunks": st.integers(1, 3),
    "num_microbatches": st.integers(1, 5),
}


@hypothesis.given(**SHAPES)
def test_schedule_runs_each_item_once_in_order(num_stages, num_chunks, num_microbatches):
    schedule = StageSchedule(num_stages, num_microbatches, num_chunks)
    when = {}
    for name in ("forward", "backward"):
        work = getattr(schedule, name)
        for tick, stage in zip(*np.nonzero(work.valid), strict=True):
            key = (name, work.microbatch[tick, stage], work.chunk[tick, stage] * num_stages + stage)
            assert key not in when
            when[key] = tick
    last = num_chunks * num_stages - 1
    assert len(when) == 2 * num_microbatches * (last + 1)
    for m in range(num_microbatches):
        for virtual in range(last):  # the transfer takes one tick, no more: nothing waits for its turn
            assert when["forward", m, virtual + 1] == when["forward", m, virtual] + 1
            assert when["backward", m, virtual] == when["backward", m, virtual + 1] + 1
        assert when["backward", m, last] == when["forward", m, last]
    leaves, which = schedule.head
    assert [(t, m) for t, m in enumerate(which) if leaves[t]] == sorted(
        (when["forward", m, last], m) for m in range(num_microbatches)
    )


@hypothesis.given(**SHAPES)
def test_schedule_keeps_inputs_until_their_backward_pass(num_stages, num_chunks, num_microbatches):
    schedule = StageSchedule(num_stages, num_microbatches, num_chunks)
    ahead, back = schedule.forward, schedule.backward
    ring = {}
    for tick in range(len(back.valid)):
        for stage in range(num_stages):
            if tick < len(ahead.valid):
                place = tick % schedule.num_slots, stage
                ring[place] = (
                    (ahead.microbatch[tick, stage], ahead.chunk[tick, stage]) if ahead.valid[tick, stage] else None
                )
            if back.valid[tick, stage]:
                assert ring[back.slot[tick, stage], stage] == (back.microbatch[tick, stage], back.chunk[tick, stage])
    assert schedule.num_slots == 2 * num_stages * num_chunks - 1


def executions(jaxpr, primitive):
    """Returns how often a program computes a primitive, elements of its first dim counted, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == primitive:
            total += eqn.outvars[0].aval.shape[0]
        inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
        for sub in (getattr(x, "jaxpr", x) for x in inner):
            if hasattr(sub, "eqns"):
                total += times * executions(sub, primitive)
    return total


def executed_layers(schedule, microbatches, **settings):
    """Returns how many layers a traced step of 4 stages and 8 layers executes; a layer is marked by a `sinh`."""
    marked = lambda x_BTD, up_DF, down_FD: jnp.sinh(x_BTD @ up_DF) @ down_FD
    task = model(dropout=False, mlp=marked)
    staged = {"schedule": schedule, "microbatches": microbatches}
    program = program_of(task, mesh={"pipeline": 4}, pipeline=staged, **settings)
    return executions(program.traced.jaxpr.jaxpr, "sinh")


@pytest.mark.slow
@pytest.mark.parametrize("schedule, chunks, passes", [("interleaved", 2, 2), ("gpipe", 1, 1), ("1f1b", 1, 2)])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_stages_idle_as_the_formula_says(schedule, chunks, passes, microbatches):
    useful = passes * 8 * microbatches
    bubble = 3 / (chunks * microbatches + 3)
    assert 1 - useful / executed_layers(schedule, microbatches) == pytest.approx(bubble)
    assert 1 - StageSchedule(4, microbatches, chunks).forward.valid.mean() == pytest.approx(bubble)


@pytest.mark.slow
@pytest.mark.parametrize("schedule, passes", [("1f1b", 2), ("gpipe", 1)])
def test_layers_are_rematerialized_once(schedule, passes):
    assert executed_layers(schedule, 4, remat="full") * passes == executed_layers(schedule, 4) * (passes + 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_cutting_moves_nothing_between_shards_and_joins_again(dim):
    x = jnp.arange(24**2).reshape(24, 24)
    parts = split(x, dim, 2, 3)
    for part in (0, 1, 2):
        rows = [4 * part + i for i in range(4)] + [12 + 4 * part + i for i in range(4)]
        np.testing.assert_array_equal(parts[part], jnp.take(x, jnp.array(rows), axis=dim))
    np.testing.assert_array_equal(join(parts, dim, 2), x)


# ---- what is refused


def run_with(embed=embed, layer=None, head=head, change=lambda params, batch: (params, batch), layers=8):
    """Returns a task whose loss runs these functions."""
    task = model(layers=layers)

    def loss_fn(params, batch, key):
        params, batch = change(params, batch)
        blocks, ends = (jnp.arange(layers), params["blocks"]), {name: params[name] for name in ("norm", "head")}
        own = layer(params) if layer else make_layer(plain_mlp, False)
        return sk.pipeline(embed, own, head)(params["table"], blocks, ends, batch)

    return sk.Task(task.init, loss_fn, task.optimizer, train_data=task.train_data, rules=task.rules)


def closing(params):
    own = make_layer(plain_mlp, False)
    return lambda x, weights, rows: {**own(x, weights, rows), "balance": x["balance"] + params["norm"].sum()}


def widening(params):
    return lambda x, weights, rows: {**x, "x": x["x"].astype(jnp.bfloat16)}


def depending(params, batch):
    return params, {**batch, "scale": jnp.broadcast_to(params["norm"].sum(), batch["tokens"].shape[:1])}


def unstacked(params, batch):
    return {**params, "blocks": {**params["blocks"], "norm": params["blocks"]["norm"][:-1]}}, batch


WRONG = {
    "closes over": ({"layer": closing}, "layer closes over a traced array.*Pass it in the parameters or in rows"),
    "changes dtype": (
        {"layer": widening},
        r"layer changes the activation: 'x' was float32.* and becomes bfloat16",
    ),
    "rows with a gradient": ({"change": depending}, r"rows hold float32\[\d+\] that depends on the parameters"),
    "not stacked": ({"change": unstacked}, "Every array has the layers as its first dim, all the same number"),
    "integers travel": (
        {"embed": lambda table, rows: rows["tokens"]},
        r"embed returned .*int32.*Leave what does not",
    ),
    "no rows": (
        {"embed": lambda table, rows: table.sum()},
        "The first dim of every array of the activation is the rows",
    ),
    "no mean": ({"head": lambda x, params, rows: x["balance"]}, "head returned float32.*it returns sk.mean"),
}


@pytest.mark.parametrize("case", WRONG)
def test_unsupported_layers_are_rejected_on_every_mesh(case):
    functions, message = WRONG[case]
    for mesh in ({}, {"pipeline": 4, "data": 2}):
        with pytest.raises(ConfigError, match=message):
            program_of(run_with(**functions), mesh=mesh)


def two_means(carry, params, rows):
    """The mean over texts' tokens, and half of the mean over examples: counts of their own, on each microbatch
    others."""
    loss, metrics = head(carry, params, rows)
    balance = sk.mean(carry["balance"])
    return loss + 0.5 * balance, {**metrics, "balance": balance, "both": loss + balance}


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_sum_of_means_is_exact_under_gpipe(microbatches):
    task = run_with(head=two_means, layers=2)
    mesh, staged = {"pipeline": 2, "data": 2}, {"schedule": "gpipe"}
    program = program_of(task, mesh=mesh, pipeline=staged, microbatches=microbatches)
    assert_same_run(train(program, evaluate=False, steps=2), train(program_of(task), evaluate=False, steps=2))


def test_sum_of_means_is_rejected_where_unsupported():
    with pytest.raises(ConfigError, match=r"a sum of 2 means.*Use pipeline.schedule: gpipe, or one sk.mean"):
        program_of(run_with(head=two_means), mesh={"pipeline": 4, "data": 2}, pipeline={"schedule": "1f1b"})


def test_indivisible_layers_are_rejected_with_repair():
    with pytest.raises(
        ConfigError,
        match=r"12 layers over 4 stages x 2 chunks = 8, found a remainder of 4\..*Try 8 or 16 layers, or mesh.*: 3",
    ):
        program_of(model(layers=12), mesh={"pipeline": 4}, pipeline={"schedule": "interleaved"})


def test_pipeline_inside_manual_is_rejected():
    def change(params, batch):
        sk.manual(lambda x: sk.pipeline(embed, make_layer(plain_mlp, False), head)(x, x, x, x), [("batch",)], ())(
            batch["tokens"]
        )
        return params, batch

    with pytest.raises(ConfigError, match=r"sk\.pipeline was called inside sk\.manual"):
        program_of(run_with(change=change), mesh={"pipeline": 2, "tensor": 2, "fsdp": 2})


def test_unused_pipeline_axis_is_rejected():
    task = model()
    loss_fn = lambda params, batch, key: sk.mean((params["table"][batch["tokens"]] ** 2).mean((1, 2)))
    ignoring = sk.Task(task.init, loss_fn, task.optimizer, train_data=task.train_data, rules=task.rules)
    with pytest.raises(ConfigError, match=r"never calls sk\.pipeline: 4 devices would repeat"):
        program_of(ignoring, mesh={"pipeline": 4})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_models_arithmetic_is_that_without_stages(schedule):
    settings = {"mesh": {"data": 2, "pipeline": 2, "tensor": 2}, "pipeline": {"schedule": schedule, "microbatches": 4}}
    staged, plain = program_of(model(manual=True), **settings), program_of(model(manual=True), mesh={"data": 8})
    assert count(staged.traced_once().jaxpr).products == count(plain.traced.jaxpr).products
    assert count(staged.traced.jaxpr).products > count(plain.traced.jaxpr).products
