"""`sk.attention` alone: every form, implementation and mask gives the numbers of the plain formula; its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops import attention_blocks, attention_splash
from spmdkit.ops.attention import own_kv_heads
from spmdkit.ops.attention_blocks import XLA, Mask, merge
from spmdkit.ops.attention_splash import BY_LENGTH, Tiles, splash
from spmdkit.step import trace_context
from tests.support.forms import slow_except
from tests.support.ops_mesh import step, value_and_grad

B, T, N, H = 4, 32, 8, 8
TOLERANCE = 2e-6


def plain(q, k, v, causal=True, segments=None, positions=None):
    """The formula, with all scores at once; a token without keys gives zeros."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(q.shape[3])
    seen = jnp.ones((1, 1, *scores.shape[2:]), bool)
    if causal:
        t = jnp.arange(q.shape[1])[None] if positions is None else jnp.atleast_2d(positions)
        seen = seen & (t[:, None, :, None] >= t[:, None, None, :])
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :]) & (segments >= 0)[:, None, :, None]
    probs = jnp.where(seen.any(-1, keepdims=True), jax.nn.softmax(jnp.where(seen, scores, -1e30)), 0)
    return jnp.einsum("BNTS,BSNH->BTNH", probs, v)


def qkv(kv_heads=N, tokens=T, keys=None, width=H, batch=B, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(batch, tokens, N, width), *[(batch, keys or tokens, kv_heads, width)] * 2]
    return tuple(jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes)


def packed(tokens=T, batch=B):
    """Segments of uneven lengths, the first tokens of each row padding."""
    random = np.random.default_rng(3)
    return jnp.asarray(np.sort(random.integers(-1, 4, (batch, tokens)), axis=1), jnp.int32)


def numbers(fn, *args, **asked):
    """Returns (result, gradients) of a weighted sum; the sum itself cancels too much to be compared."""
    (_, out), grads = value_and_grad(fn, *args, **asked)
    return out, grads


def assert_equal(found, expected, tolerance=TOLERANCE):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.isfinite(x).all()
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


def on_mesh(op, *args, segments=None, attention=None, **asked):
    """Returns `numbers`, with the tokens put into the mesh's order and back."""

    def in_order(*args):
        *args, ids = sk.context_order((*args, segments))
        return sk.context_restore(op(*args, ids))

    settings = trace_context.AttentionSettings(**(attention or {}))
    return numbers(in_order, *args, attention=settings, **asked)


FORMS = {"ring": {}, "contiguous": {"order": "contiguous"}, "all to all": {"context": "all_to_all"}}
CASES = {
    "causal": {},
    "packed": {"segments": packed()},
    "whole": {"causal": False},
    "whole packed": {"causal": False, "segments": packed()},
}


DEFAULT = [("ring", "packed"), ("contiguous", "packed"), ("all to all", "packed")]


@pytest.mark.parametrize("form, case", slow_except(DEFAULT, [(form, case) for form in FORMS for case in CASES]))
def test_a_cut_sequence_gives_the_plain_formula(form, case):
    options = dict(CASES[case])
    segments, causal = options.pop("segments", None), options.pop("causal", True)
    op = lambda q, k, v, ids: sk.attention(q, k, v, causal=causal, segment_ids_BT=ids)
    expected = numbers(functools.partial(plain, causal=causal, segments=segments), *qkv())
    assert_equal(on_mesh(op, *qkv(), segments=segments, attention=FORMS[form], context=4), expected)


@pytest.mark.forms(1)
@pytest.mark.parametrize("form", ["ring", "all to all"])
@pytest.mark.parametrize(
    "kv_heads, asked", [(4, {"context": 2, "tensor": 2, "fsdp": 2}), (2, {"context": 2, "tensor": 4})]
)
def test_grouped_heads_are_cut_or_repeated(kv_heads, asked, form):
    op = lambda q, k, v, ids: sk.attention(q, k, v)
    assert_equal(on_mesh(op, *qkv(kv_heads), attention=FORMS[form], **asked), numbers(plain, *qkv(kv_heads)))


@pytest.mark.parametrize("form", slow_except(["ring"], FORMS))
def test_positions_say_who_sees_whom(form):
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 9, (B, T)), jnp.int32)
    expected = numbers(functools.partial(plain, positions=positions), *qkv())
    op = lambda q, k, v, ids: sk.attention(q, k, v, positions_BT=ids)
    assert_equal(on_mesh(op, *qkv(), segments=positions, attention=FORMS[form], context=4), expected)


@pytest.mark.slow
def test_inside_of_a_manual_part_shards_go_in():
    """Heads and tokens are cut around the op, which is one line of the part."""

    def block(x_BTD, wq, wk, wv):
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", x_BTD, w) for w in (wq, wk, wv))
        return sk.attention(q, k, v)

    rows, heads = ("batch", "sequence", None), (None, "heads", None)
    part = sk.manual(block, [rows, heads, heads, heads], ("batch", "sequence", "heads", None))
    random = np.random.default_rng(0)
    args = [jnp.asarray(random.normal(size=s), jnp.float32) for s in [(B, T, 16), *[(16, N, H)] * 3]]
    expected = numbers(lambda x, *w: plain(*(jnp.einsum("BTD,DNH->BTNH", x, a) for a in w)), *args)
    in_order = lambda x, *w: sk.context_restore(part(sk.context_order(x), *w))
    assert_equal(numbers(in_order, *args, context=2, tensor=2), expected, 4e-6)


def test_manual_part_matches_few_key_heads_to_queries():
    part = sk.manual(
        lambda q, k, v: sk.attention(q, own_kv_heads(k), own_kv_heads(v)),
        [("batch", None, "heads"), ("batch",), ("batch",)],
        ("batch", None, "heads"),
    )
    assert_equal(numbers(part, *qkv(2), fsdp=2, tensor=4), numbers(plain, *qkv(2)))


# ---- the order


def global_of(fn, *args, **asked):
    with trace_context.tracing(step(**asked)) as record:
        return jax.jit(fn)(
            *jax.device_put(args, jax.sharding.NamedSharding(record.sharding.mesh, jax.sharding.PartitionSpec()))
        )


def test_each_device_holds_early_and_late_chunks():
    x_T = np.arange(16)
    ordered = global_of(lambda x: sk.context_order(x, dim=0), x_T, context=4)
    shards = sorted(ordered.addressable_shards, key=lambda s: s.index[0].start)
    assert [np.asarray(shard.data).tolist() for shard in shards] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]
    assert (global_of(lambda x: sk.context_restore(sk.context_order(x, dim=0), dim=0), x_T, context=4) == x_T).all()
    contiguous = trace_context.AttentionSettings(order="contiguous")
    assert (global_of(lambda x: sk.context_order(x, dim=0), x_T, context=4, attention=contiguous) == x_T).all()


def test_targets_stay_with_their_inputs_across_the_seams():
    tokens_BT = jnp.asarray(np.random.default_rng(0).permutation(2 * 33).reshape(2, 33))
    cut = lambda tokens: (*sk.context_order((tokens[:, :-1], tokens[:, 1:])), sk.context_positions(32))
    inputs_BT, targets_BT, positions_T = map(np.asarray, global_of(cut, tokens_BT, context=8))
    tokens_BT = np.asarray(tokens_BT)
    assert (inputs_BT == tokens_BT[:, positions_T]).all()
    assert (targets_BT == tokens_BT[:, positions_T + 1]).all()
    assert sorted(positions_T) == list(range(32))


def test_without_a_context_axis_nothing_happens():
    x_BT = jnp.arange(10).reshape(2, 5)
    both = lambda x: (sk.context_order(x), sk.context_restore(x), sk.context_positions(5))
    found = global_of(both, x_BT, tensor=4)
    assert (found[0] == x_BT).all() and (found[1] == x_BT).all() and list(found[2]) == [0, 1, 2, 3, 4]
    assert sk.context_order(x_BT) is x_BT
    assert isinstance(sk.context_positions(5), np.ndarray)


# ---- blocks


def pair(implementation, mask, q, k, v, weights):
    """Returns (out, lse, dq, dk, dv) of an implementation's two passes, for the cotangent `weights`."""
    scale = 1 / np.sqrt(q.shape[3])
    out, lse = implementation.forward(q, k, v, mask, scale)
    return out, lse, *implementation.backward(q, k, v, out, lse, weights, mask, scale)


def expected_pair(q, k, v, weights, **options):
    @jax.jit
    def out_and_gradients(q, k, v, weights):
        out, vjp = jax.vjp(functools.partial(plain, **options), q, k, v)
        return out, *vjp(weights)

    return out_and_gradients(q, k, v, weights)


@pytest.mark.forms(1)
@pytest.mark.parametrize("tokens, keys", [(20, None), (32, None), (20, 33)])
@pytest.mark.parametrize("options", [{"segments": True}, {"causal": False}, {}], ids=str)
def test_blocks_give_what_all_scores_at_once_give(tokens, keys, options, monkeypatch):
    monkeypatch.setattr(attention_blocks, "BLOCK", 8)
    monkeypatch.setattr(attention_blocks, "WHOLE", 8)
    causal = options.get("causal", True) and keys is None
    segments = packed(tokens) if "segments" in options and keys is None else None
    q, k, v = qkv(2, tokens, keys)
    weights = qkv(tokens=tokens, seed=1)[0]
    mask = Mask(causal, segments, segments)
    out, _, *grads = jax.jit(functools.partial(pair, XLA, mask))(q, k, v, weights)
    if segments is not None:
        weights, out = (jnp.where(segments[:, :, None, None] < 0, 0, x) for x in (weights, out))
        _, _, *grads = jax.jit(functools.partial(pair, XLA, mask))(q, k, v, weights)
    assert_equal((out, *grads), expected_pair(q, k, v, weights, causal=causal, segments=segments))


def test_a_row_without_keys_is_zero_and_finite():
    q, k, v = qkv()
    nobody = jnp.zeros((B, T), jnp.int32).at[:, 5].set(7)
    mask = Mask(False, nobody, jnp.zeros((B, T), jnp.int32))
    out, lse, *grads = map(np.asarray, jax.jit(functools.partial(pair, XLA, mask))(q, k, v, jnp.ones_like(q)))
    assert (out[:, 5] == 0).all() and (lse[:, 5] == -jnp.inf).all()
    assert all(np.isfinite(g).all() for g in grads) and (grads[0][:, 5] == 0).all()
    twice = jax.jit(merge)(out, lse, out, lse)
    assert (twice[0][:, 5] == 0).all() and (twice[1][:, 5] == -jnp.inf).all()
    np.testing.assert_allclose(twice[0], out, rtol=1e-6)


def test_memory_grows_linearly_with_sequence_length():
    def temporaries(tokens):
        q = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32)
        loss = lambda q, k, v: sk.attention(q, k, v).sum()
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 4 * 2 * 4096**2 / 4  # of all scores at once


FUSED = Tiles(block_q=128, block_kv=256, block_kv_compute=128, fused_backward=True)


@pytest.mark.parametrize(
    "causal, segments, tiles",
    slow_except(
        [(True, True, BY_LENGTH), (True, True, FUSED)],
        [(causal, ids, tiles) for causal in (True, False) for ids in (True, False) for tiles in (BY_LENGTH, FUSED)],
    ),
)
def test_the_splash_kernel_gives_the_plain_formula(causal, segments, tiles, monkeypatch):
    """The kernel's own program, interpreted, without a TPU: four tiles, of which the mask hides one."""
    monkeypatch.setattr(attention_splash, "BLOCKS", (128,))
    q, k, v = qkv(1, 256, width=40, batch=1)
    q, weights = q[:, :, :2], qkv(tokens=256, width=40, batch=1, seed=1)[0][:, :, :2]
    ids = packed(256, 1) + 1 if segments else None
    mask = Mask(causal, ids, ids)
    out, lse, *grads = jax.jit(functools.partial(pair, splash(tiles, interpret=True), mask))(q, k, v, weights)
    assert_equal((out, *grads), expected_pair(q, k, v, weights, causal=causal, segments=ids), 1e-5)
    expected_lse = jax.jit(functools.partial(XLA.forward, mask=mask, scale=1 / np.sqrt(40)))(q, k, v)[1]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


# ---- what cannot be


@pytest.mark.parametrize(
    "asked, change, message",
    [
        ({"tensor": 8}, lambda *qkv: (x[:, :, :4] for x in qkv), r"4 query heads are sharded over mesh.tensor 8 = 8"),
        ({}, lambda q, k, v: (q, k[:, :, :3], v[:, :, :3]), "8 is not divisible by 3"),
        ({}, lambda q, k, v: (q[:, :5], k, v), "found 5 queries and 32 keys"),
        ({}, lambda q, k, v: (q.astype(jnp.bfloat16), k, v), "They have one dtype"),
        ({}, lambda q, k, v: (q[0], k, v), r"They are q \[B, T, N, H\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(asked, change, message):
    with trace_context.tracing(step(**asked)), pytest.raises(ConfigError, match=message):
        sk.attention(*change(*qkv()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"segment_ids_BT": jnp.zeros((B, T))}, r"segment_ids_BT is float32\[4, 32\]"),
        ({"positions_BT": jnp.zeros((T,), jnp.int32), "causal": False}, "has no effect with causal=False"),
        ({"implementation": "splsh"}, "implementation is 'splsh'. Did you mean 'splash'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        sk.attention(*qkv(), **options)
