"""What the forms of `sk.attention` send, read from the compiled program, is what their docstrings say; and who does how
much."""

import dataclasses
import re

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import spmdkit as sk
from spmdkit.plan.flops import count
from spmdkit.step import trace_context
from tests.support.forms import slow_except
from tests.support.ops_mesh import sent_by, sharding_of, step, wire

B, T, N, K, H = 4, 64, 8, 4, 16
HEADS = ("batch", "sequence", "heads", None)
MESHES = [{"context": 4}, {"context": 4, "fsdp": 2}, {"context": 2, "tensor": 2, "fsdp": 2}, {"context": 8}]


def attend(segments):
    def op(q, k, v, ids=None):
        trace_context.current().usage.record_call("context_order")
        return sk.attention(q, k, v, segment_ids_BT=ids)

    ids = [((B, T), ("batch", "sequence"), "int32")] if segments else []
    return op, [((B, T, N, H), HEADS), ((B, T, K, H), HEADS), ((B, T, K, H), HEADS), *ids]


def bytes_of(asked, heads):
    shards = asked["context"] * asked.get("fsdp", 1) * asked.get("tensor", 1)
    return 4 * B * T * heads * H // shards


def passes(op, args, **asked):
    """Returns what the forward pass sends, and what the backward pass does: two programs, the residuals between
    them."""
    record = step(**asked)
    cut = lambda dims: sharding_of(record, dims)
    given = [jax.ShapeDtypeStruct(shape, *dtype or [jnp.float32], sharding=cut(dims)) for shape, dims, *dtype in args]
    qkv, ids = given[:3], given[3:]
    with trace_context.tracing(record):
        lowered = jax.jit(lambda qkv, ids: jax.vjp(lambda *qkv: op(*qkv, *ids), *qkv)).lower(qkv, ids)
        forward = lowered.compile()
        shapes, treedef = jax.tree.flatten(lowered.out_info)
        places = jax.tree.leaves(forward.output_shardings)
        place = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        out, pull = jax.tree.unflatten(treedef, map(place, shapes, places))
        run = jax.jit(lambda pull, dout: pull(dout), out_shardings=tuple(x.sharding for x in qkv))
        backward = run.lower(pull, place(out, cut(HEADS))).compile()
    return sent_by(forward, record), sent_by(backward, record)


SLOW = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    "asked, segments", slow_except([({"context": 4}, True)], [(m, s) for m in MESHES for s in (True, False)]), ids=str
)
def test_the_ring_passes_keys_values_and_their_gradients(segments, asked):
    turns, kv = asked["context"] - 1, 2 * bytes_of(asked, K)
    ids = 4 * B * T // (asked["context"] * asked.get("fsdp", 1)) if segments else 0
    forward, backward = passes(*attend(segments), **asked)
    assert forward == {("collective_permute", "context"): turns * (kv + ids)}
    assert backward == {("collective_permute", "context"): turns * (kv + kv + ids)}


@pytest.mark.parametrize("dtype, sent", [(None, {"f32"}), (jnp.bfloat16, {"f32", "bf16"})])
def test_gradients_in_the_ring_have_the_dtype_of_reduction(dtype, sent):
    op, args = attend(False)
    with trace_context.tracing(step(context=4, reduction_dtype=dtype)):
        gradient = jax.jit(jax.grad(lambda *qkv: op(*qkv).sum(), (0, 1, 2)))
        text = gradient.lower(*(jnp.ones(shape) for shape, _ in args)).as_text()
    assert set(re.findall(r"collective_permute.*x(\w+)>\n", text)) == sent


@pytest.mark.parametrize(
    "asked, segments", [({"context": 4, "fsdp": 2}, True), pytest.param(MESHES[2], False, **SLOW)], ids=str
)
def test_all_to_all_sends_nothing_twice(segments, asked):
    num, q, kv = asked["context"], bytes_of(asked, N), 2 * bytes_of(asked, K)
    ids = 4 * B * T // (num * asked["fsdp"]) if segments else 0
    gathered = {("all_gather", "context"): (num - 1) * ids} if segments else {}
    expected = {("all_to_all", "context"): (num - 1) * (q + kv + q) // num} | gathered
    forward, backward = passes(
        *attend(segments), **asked, attention=trace_context.AttentionSettings(context="all_to_all")
    )
    assert forward == expected and backward == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_few_key_heads_are_summed_and_gathered(kv_heads):
    op, args = attend(False)
    whole = ("batch", "sequence", None, None)
    args = [args[0], *[((B, T, kv_heads, H), whole)] * 2]
    kv, copies = 2 * 4 * B * T * H // 2, 4 // kv_heads  # one head, as each device holds it
    forward, backward = passes(op, args, context=2, tensor=4)
    assert forward == {("collective_permute", "context"): kv}
    gathered = {("all_gather", "tensor"): (kv_heads - 1) * kv} if kv_heads > 1 else {}
    added = {("all_reduce", "tensor"): 2 * (copies - 1) * kv // copies}
    assert backward == {("collective_permute", "context"): 2 * kv} | added | gathered


def test_putting_tokens_into_order_sends_nothing():
    into = lambda tokens: sk.context_order(tokens)
    tokens = ((B, T), ("batch", None), "int32")
    assert wire(into, ("batch", "sequence"), tokens, context=4, fsdp=2) == {}
    back = lambda x: sk.context_restore(x)
    found = wire(back, ("batch", "sequence"), ((B, T), ("batch", "sequence")), context=4, fsdp=2)
    assert found == {("collective_permute", "context"): 4 * B * T // 8}


# ---- who does how much


def branches(jaxpr):
    """Returns at how many places of a program a device may go its own way."""
    inner = [b for e in jaxpr.eqns for b in jax.extend.core.jaxprs_in_params(e.params)]
    return sum(e.primitive.name == "cond" for e in jaxpr.eqns) + sum(map(branches, inner))


def scores(context, order, backward):
    """Returns (scores that the busiest device computes in a causal pass over T tokens, branches of the program)."""
    record = dataclasses.replace(
        step(context=context, attention=trace_context.AttentionSettings(order=order)), in_manual=True
    )
    op, _ = attend(False)
    run = jax.grad(lambda *qkv: op(*qkv).sum(), (0, 1, 2)) if backward else op
    spec = PartitionSpec(None, "context")
    q = jax.ShapeDtypeStruct((1, T, 1, H), jnp.float32)
    with trace_context.tracing(record):
        jaxpr = jax.make_jaxpr(jax.shard_map(run, mesh=record.sharding.mesh, in_specs=spec, out_specs=spec))(q, q, q)
    products = 2 + 5 if backward else 2  # forward: q k and p v; backward: again q k, and four gradients
    return count(jaxpr).products / (context * products * 2 * H), branches(jaxpr.jaxpr)


@pytest.mark.parametrize("context", [4, pytest.param(2, **SLOW), pytest.param(8, **SLOW)])
@pytest.mark.parametrize("backward", [False, True])
def test_zigzag_order_balances_work(context, backward):
    own = (T // context) ** 2
    # No branch: what is counted is what each device does. The own block is a square, of which half is seen.
    assert scores(context, "zigzag", backward) == (own + (context - 1) * own / 2, 0)
    longest, places = scores(context, "contiguous", backward)
    assert longest == context * own and places > 0  # the last device; the first one has one block


def test_plan_counts_work_of_a_part():
    op, args = attend(False)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in args]
    with trace_context.tracing(step(context=4, fsdp=2)):
        found = count(jax.make_jaxpr(op)(*given)).products
    own = (T // 4) ** 2
    assert found == 8 * (B // 2) * N * (own + 3 * own / 2) * 2 * 2 * H
