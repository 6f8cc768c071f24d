"""What a pipeline sends and keeps, read from the compiled program, is what its docstrings say."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.mesh.mesh import canonical
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.step import trace_context
from tests.support.forms import slow_except
from tests.support.ops_mesh import step

D, F, V, LAYERS, ROWS_OF_MICROBATCH = 16, 32, 12, 16, 8


def layer(x_BTD, w, rows):
    return x_BTD + jnp.tanh(x_BTD @ w["up"]) @ w["down"]


def head(x_BTD, out_DV, rows):
    logits_BTV = jax.nn.log_softmax(x_BTD @ out_DV)
    return sk.mean(-jnp.take_along_axis(logits_BTV, rows["targets"][..., None], -1)[..., 0])


def loss(params, rows, stacked_dims=1):
    embed = lambda table_VD, rows: table_VD[rows["tokens"]]
    run = sk.pipeline(embed, layer, head, head_per_token=True, stacked_dims=stacked_dims)
    return run(params["table"], params["layers"], params["out"], rows).value


def arguments(microbatches, tokens=16, chunks=None):
    """Returns (params, rows); with `chunks` the layers are stacked on two dims."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
    params = {
        "table": array(V, D),
        "layers": {"up": array(LAYERS, D, F), "down": array(LAYERS, F, D)},
        "out": array(D, V),
    }
    if chunks:
        params["layers"] = jax.tree.map(lambda w: w.reshape(chunks, -1, *w.shape[1:]), params["layers"])
    ids = rng.integers(0, V, (microbatches * ROWS_OF_MICROBATCH, tokens))
    return params, {"tokens": jnp.asarray(ids, jnp.int32), "targets": jnp.asarray(ids[:, ::-1], jnp.int32)}


@functools.cache
def compiled(schedule, microbatches, chunks=1, stacked_dims=1, tokens=16, **asked):
    """Returns the compiled `(loss, gradients)` of a mesh, and its arguments in place."""
    record = step(**asked).with_options(pipeline=trace_context.PipelineSettings(schedule, microbatches, chunks))
    params, rows = arguments(microbatches, tokens, chunks if stacked_dims == 2 else None)
    on = lambda *dims: jax.NamedSharding(record.sharding.mesh, canonical(dims, record.sharding.sizes))
    stack = (*(None for _ in range(stacked_dims - 1)), "pipeline")
    places = {"table": on(), "layers": {"up": on(*stack), "down": on(*stack)}, "out": on()}
    args = jax.device_put(params, places), jax.device_put(rows, on(("fsdp", "expert")))
    run = jax.jit(jax.value_and_grad(functools.partial(loss, stacked_dims=stacked_dims)), out_shardings=(on(), places))
    with trace_context.tracing(record):
        return run.lower(*args).compile(), args, record.sharding.sizes


def sent(*case, **asked):
    """Returns op -> bytes that one device sends along the pipeline axis alone, the loss's own scalars left out."""
    program, _, sizes = compiled(*case, **asked)
    found = {}
    for c in read_bill(parse(program.as_text()), sizes).collectives:
        if c.axes == ("pipeline",) and c.size > 64:
            found[c.op] = found.get(c.op, 0) + c.bytes
    return found


CASES = {
    "interleaved": ("interleaved", 4, 2, {"pipeline": 4}),
    "interleaved with fsdp": ("interleaved", 4, 2, {"pipeline": 4, "fsdp": 2}),
    "gpipe": ("gpipe", 8, 1, {"pipeline": 8}),
    "1f1b": ("1f1b", 6, 1, {"pipeline": 4, "fsdp": 2}),
    "interleaved, stacked on two dims": ("interleaved", 4, 2, {"pipeline": 4, "fsdp": 2}),
}


@pytest.mark.parametrize("case", slow_except(list(CASES)[:1], CASES))
def test_activations_move_once_per_tick(case):
    schedule, num_microbatches, num_chunks, mesh = CASES[case]
    stacked_dims = 2 if "two dims" in case else 1
    num_stages = mesh["pipeline"]
    activation = 4 * ROWS_OF_MICROBATCH * 16 * D // mesh.get("fsdp", 1)
    ticks = num_chunks * num_microbatches + num_stages - 1
    ends = 4 * (V * D + D * V)
    stage = 4 * LAYERS // num_stages * 2 * D * F
    reorders = 2 * (num_chunks > 1 and stacked_dims == 1)
    # Of a conditional the bill counts the dear branch: the head's transfers in every tick, not in one of v.
    heads = num_microbatches if num_chunks == 1 else num_chunks * (num_microbatches - num_stages) + num_stages
    found = sent(schedule, num_microbatches, num_chunks, stacked_dims, **mesh)
    in_parts = (num_stages - 1) / num_stages
    assert 0 <= found.pop("all_reduce") - 2 * in_parts * ends <= 32  # with it go the loss's sum and count
    assert found == {
        "collective_permute": 2 * ticks * activation + reorders * stage,
        "all_to_all": 2 * heads * in_parts * activation + reorders * stage * (num_chunks - 1) / num_chunks,
    }


@pytest.mark.parametrize("case", slow_except(list(CASES)[:1], CASES))
def test_measured_gradient_equals_one_device(case):
    schedule, num_microbatches, num_chunks, mesh = CASES[case]
    program, args, _ = compiled(schedule, num_microbatches, num_chunks, 2 if "two dims" in case else 1, **mesh)
    found = jax.device_get(program(*args))
    expected = jax.device_get(jax.jit(jax.value_and_grad(loss))(*arguments(num_microbatches)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, rtol=1e-4, atol=1e-6)


def test_gpipe_saves_no_weights_per_microbatch():
    program, _, sizes = compiled("gpipe", 2, tokens=64, pipeline=8)
    arrays = re.findall(rf"f32\[([\d,]*){D},{F}\]", program.as_text())
    copies = [math.prod(int(n) for n in lead.split(",") if n) for lead in arrays]
    assert max(copies) == LAYERS // sizes["pipeline"]


def temporaries(*case, **asked):
    """Returns the bytes of temporary memory of one device, less what grows with the rows themselves (their indices)."""
    program, args, _ = compiled(*case, **asked)
    return program.memory_analysis().temp_size_in_bytes, sum(x.nbytes for x in jax.tree.leaves(args[1]))


@pytest.mark.slow
def test_memory_of_1f1b_is_bounded_by_the_stages():
    few, rows_of_few = temporaries("1f1b", 4, tokens=64, pipeline=8)
    many, rows_of_many = temporaries("1f1b", 32, tokens=64, pipeline=8)
    assert many - few <= rows_of_many - rows_of_few
    assert many < 1.2 * few


@pytest.mark.slow
@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("interleaved", 2)])
def test_only_gpipe_memory_grows_with_microbatches(schedule, chunks):
    sizes = {m: temporaries(schedule, m, chunks, tokens=64, pipeline=8)[0] for m in (4, 8, 16, 32)}
    activation = 4 * ROWS_OF_MICROBATCH * 64 * D
    if schedule == "interleaved":
        assert sizes[32] < 1.2 * sizes[4]
    else:  # at least the input of a stage for each tick
        assert all(sizes[2 * m] - sizes[m] >= m * activation for m in (4, 8, 16)), sizes
