"""Forward mode, second order and a gradient penalty through parts and ops: on every mesh those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops import vocab
from spmdkit.ops.both_modes import both_modes
from spmdkit.ops.collectives import all_gather, reduce_scatter
from spmdkit.ops.moe.blocks import by_blocks
from spmdkit.step import trace_context
from tests.support.core_runs import assert_close
from tests.support.forms import slow_except
from tests.support.ops_mesh import step

B, T, D, F = 4, 4, 8, 16
ROWS = ("batch", "norm_sequence", None)
DIMS = [ROWS, ("embed", "mlp"), ("mlp", "embed")]


def pair(x, up, down):
    x = all_gather(x, "mlp", dim=1)
    up, down = all_gather(up, "embed", dim=0), all_gather(down, "embed", dim=1)
    return reduce_scatter(jnp.tanh(x @ up) @ down, "mlp", dim=1)


OPS = {
    "manual": sk.manual(pair, DIMS, ROWS),
    "column_row": lambda x, up, down: sk.column_row_parallel(x, [up], jnp.tanh, down),
}


def loss_of(op):
    return lambda x, up, down: (op(x, up, down) ** 2 * jnp.cos(jnp.arange(T * D).reshape(T, D))).sum()


def slope(loss, args):
    return jax.grad(loss, tuple(range(len(args))))


def penalty(loss):
    """The gradient of the norm of a gradient."""
    norm = lambda *args: sum((g**2).sum() for g in jax.grad(loss, (0, 1))(*args))
    return lambda args, tangents: slope(norm, args)(*args)


KINDS = {
    "jvp": lambda loss: lambda args, tangents: jax.jvp(loss, args, tangents),
    "forward over reverse": lambda loss: lambda args, tangents: jax.jvp(slope(loss, args), args, tangents),
    "reverse over forward": lambda loss: (
        lambda args, tangents: slope(lambda *args: jax.jvp(loss, args, tangents)[1], args)(*args)
    ),
    "reverse over reverse": penalty,
}


SECOND_ORDER = ("forward over reverse", "reverse over reverse")
"""The kinds of an op with a hand-written gradient alone."""


def kinds(default, names=tuple(KINDS)):
    """Marks as slow every kind but one."""
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[] if kind == default else pytest.mark.slow) for kind in names]
    )


def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 2
    return [(draw(B, T, D), draw(D, F), draw(F, D)) for _ in range(2)]


def on_mesh(kind, op, args, tangents, **asked):
    record = step(**asked)
    whole = lambda tree: jax.device_put(tree, NamedSharding(record.sharding.mesh, PartitionSpec()))
    with trace_context.tracing(record):
        return jax.jit(KINDS[kind](loss_of(op)))(whole(args), whole(tangents))


def in_replicas(kind, op, args, tangents):
    """The mapped form: the weights are the same on both replicas, each has its own examples."""
    record = step(data=2, tensor=2)
    args, tangents = jax.device_put((args, tangents), NamedSharding(record.sharding.mesh, PartitionSpec()))

    def one(x, dx):
        return KINDS[kind](loss_of(op))((x, *args[1:]), (dx, *tangents[1:]))

    cut = lambda x: x.reshape(2, -1, *x.shape[1:])
    with trace_context.tracing(record):
        return jax.jit(jax.vmap(one, axis_name="data", spmd_axis_name="data"))(cut(args[0]), cut(tangents[0]))


def plain(x, up, down):
    return jnp.tanh(x @ up) @ down


@pytest.mark.parametrize(
    "op, kind", slow_except([("column_row", "reverse over forward")], [(op, kind) for op in OPS for kind in KINDS])
)
def test_derivatives_through_a_part_equal_one_device(op, kind):
    args, tangents = arrays()
    expected = jax.jit(KINDS[kind](loss_of(plain)))(args, tangents)
    assert_close(on_mesh(kind, OPS[op], args, tangents, data=2, tensor=2), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_in_replicas_are_each_replicas_own(kind):
    args, tangents = arrays()
    cut = lambda x: x.reshape(2, -1, *x.shape[1:])
    of = lambda x, dx: KINDS[kind](loss_of(plain))((x, *args[1:]), (dx, *tangents[1:]))
    assert_close(in_replicas(kind, OPS["manual"], args, tangents), jax.vmap(of)(cut(args[0]), cut(tangents[0])))


@kinds("reverse over reverse")
def test_derivatives_of_a_part_that_has_been_mapped(kind):
    """The vmap inside: weights that it does not map get the sum."""
    args, tangents = arrays()
    mapped = lambda op: lambda x, up, down: jax.vmap(op, (0, None, None))(jnp.stack([x, x**2]), up, down).sum(0)
    expected = jax.jit(KINDS[kind](loss_of(mapped(plain))))(args, tangents)
    assert_close(on_mesh(kind, mapped(OPS["manual"]), args, tangents, fsdp=2, tensor=2), expected)


def plain_attention(q, k, v):
    T = q.shape[1]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[3])
    seen = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(seen), v)


ALL_TO_ALL = trace_context.AttentionSettings(context="all_to_all")
FORMS = {
    "tensor 2": ({"tensor": 2}, None),
    "ring of 2": ({"context": 2}, None),
    "all_to_all": ({"context": 2}, ALL_TO_ALL),
    "data 2 x tensor 2": ({"data": 2, "tensor": 2}, None),
    "one device": ({"tensor": 1}, None),
}


def heads():
    rng = np.random.default_rng(0)
    return [tuple(rng.normal(size=(2, 8, 2, 4)).astype(np.float32) for _ in range(3)) for _ in range(2)]


def in_order(*args):
    return sk.context_restore(sk.attention(*sk.context_order(args)))


def weighted(op):
    return lambda *args: (op(*args) ** 2 * jnp.arange(1, 5, dtype=jnp.float32)).sum()


@pytest.mark.parametrize(
    "form, kind",
    slow_except([("ring of 2", "reverse over reverse"), ("all_to_all", "jvp")], [(f, k) for f in FORMS for k in KINDS]),
)
def test_derivatives_through_attention_are_those_of_one_device(form, kind):
    asked, attention = FORMS[form]
    args, tangents = heads()
    expected = jax.jit(KINDS[kind](weighted(plain_attention)))(args, tangents)
    record = step(attention, **asked)
    whole = lambda tree: jax.device_put(tree, NamedSharding(record.sharding.mesh, PartitionSpec()))
    with trace_context.tracing(record):
        found = jax.jit(KINDS[kind](weighted(in_order)))(whole(args), whole(tangents))
    assert_close(found, expected)


@kinds("reverse over forward")
def test_attention_derivatives_in_a_part_equal_one_device(kind):
    args, tangents = heads()
    expected = jax.jit(KINDS[kind](weighted(plain_attention)))(args, tangents)
    dims = ("batch", None, "heads", None)
    part = sk.manual(lambda q, k, v: sk.attention(q, k, v), [dims] * 3, dims)
    assert_close(on_mesh_of(lambda *both: KINDS[kind](weighted(part))(*both), args, tangents, tensor=2), expected)


def on_mesh_of(fn, *args, **asked):
    record = step(**asked)
    with trace_context.tracing(record):
        return jax.jit(fn)(*jax.device_put(args, NamedSharding(record.sharding.mesh, PartitionSpec())))


def mixture(capacity):
    def loss(x, router, up, down):
        y, load = sk.moe(x, router, {"up": up, "down": down}, top_k=2, capacity=capacity)
        return (y**2).sum() + load.balance_B.sum()

    return loss


def plain_mixture(x, router, up, down):
    """Every expert over every token, none dropped."""
    probs = jax.nn.softmax(x @ router)
    weight, chosen = jax.lax.top_k(probs, 2)
    share = jnp.sum(jax.nn.one_hot(chosen, 4) * (weight / weight.sum(-1, keepdims=True))[..., None], -2)
    each = jnp.einsum("btef,efd->bted", jax.nn.gelu(jnp.einsum("btd,edf->btef", x, up)), down)
    number = jax.nn.one_hot(chosen, 4).sum((1, 2)) / (2 * x.shape[1])
    return (jnp.einsum("bte,bted->btd", share, each) ** 2).sum() + (4 * number * probs.mean(1)).sum()


def loss_of_tokens(hidden, head):
    return sk.cross_entropy(hidden, head, jnp.arange(16, dtype=jnp.int32).reshape(4, 4), z_loss=0.1, chunk=3).sum()


def plain_loss_of_tokens(hidden, head):
    logits = (hidden @ head).reshape(16, 16)
    logsumexp = jax.nn.logsumexp(logits, -1)
    return (logsumexp - jnp.diag(logits) + 0.1 * logsumexp**2).sum()


HEAD, EXPERTS = [(4, 4, D), (D, 16)], [(4, 4, D), (D, 4), (4, D, F), (4, F, D)]
OTHERS = {
    "cross_entropy": (loss_of_tokens, plain_loss_of_tokens, HEAD, {"tensor": 2}),
    "moe with capacity": (mixture(4.0), plain_mixture, EXPERTS, {"expert": 2}),
    "moe": (mixture(None), plain_mixture, EXPERTS, {"expert": 2}),
}


KINDS_OF = {"cross_entropy": KINDS, "moe with capacity": SECOND_ORDER, "moe": ["reverse over reverse"]}
DEFAULT = [("cross_entropy", "reverse over forward"), ("moe", "reverse over reverse")]


@pytest.mark.parametrize("op, kind", slow_except(DEFAULT, [(op, kind) for op in OTHERS for kind in KINDS_OF[op]]))
def test_derivatives_through_other_ops_equal_one_device(op, kind):
    """Their parts have integer results, and sums and maxima over devices."""
    loss, plain, shapes, asked = OTHERS[op]
    rng = np.random.default_rng(0)
    args, tangents = (tuple(rng.normal(size=s).astype(np.float32) / 2 for s in shapes) for _ in range(2))
    expected = jax.jit(KINDS[kind](plain))(args, tangents)
    assert_close(on_mesh_of(KINDS[kind](loss), args, tangents, **asked), expected)


def test_second_derivative_of_unused_experts_is_zero():
    rng = np.random.default_rng(0)
    rows, cotangents, weights = (rng.normal(size=s).astype(np.float32) for s in ((24, 4), (24, 4), (2, 4, 4)))
    sizes, expert = jnp.array([5, 6]), np.repeat([0, 1, 2], [5, 6, 13])

    def slope(run):
        of_weights = lambda c: jax.vjp(lambda w: run(w, rows), weights)[1](c)[0]
        return jax.jit(jax.grad(lambda c: (jnp.cos(weights) * of_weights(c)).sum()))(cotangents)

    found = slope(lambda w, x: by_blocks(lambda _, w, x: jnp.exp((x + 1) @ w), 8, (), w, x, sizes))
    plain = lambda w, x: (
        jnp.exp(jnp.einsum("rd,rdf->rf", x + 1, w[np.minimum(expert, 1)])) * jnp.float32(expert < 2)[:, None]
    )
    assert_close(found, slope(plain))


@pytest.mark.parametrize("implementation", ["splash", "cudnn"])
def test_a_second_derivative_through_a_kernel_is_refused(implementation):
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    loss = lambda q: sk.attention(q, q, q, implementation=implementation).astype(jnp.float32).sum()
    with pytest.raises(ConfigError, match=r"second derivative.*kernel.*implementation: xla\}"):
        jax.eval_shape(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum().astype(jnp.float32)), q)


# ---- both_modes


def by_scan(targets, x, w):
    """A loop whose turns have something in common, which JAX's partial evaluation would take out of it."""
    turn = lambda x, row: (jnp.tanh(x @ w) + jnp.where(jnp.arange(4) < 2, row, 0.5), None)
    return jax.lax.scan(turn, x, jnp.sin(w))[0] * jnp.asarray(targets, x.dtype)


def forward(count, x, w):
    return by_scan(count, x, w), (x, w, count)


def tangent(kept, tangents):
    x, w, count = kept
    return jax.jvp(lambda x, w: by_scan(count, x, w), (x, w), tuple(tangents))[1]


def backward(kept, cotangent):
    x, w, count = kept
    return jax.vjp(lambda x, w: by_scan(count, x, w), x, w)[1](cotangent)


def as_custom_vjp(forward, tangent, backward):
    """Returns what `both_modes` would be without a forward mode."""
    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, lambda kept, cotangent: (None, *backward(kept, cotangent)))
    return run


in_both, by_hand = (make(forward, tangent, backward) for make in (both_modes, as_custom_vjp))


def scan_arguments():
    rng = np.random.default_rng(0)
    return np.int32(3), rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(4, 4)).astype(np.float32)


def stacked(fn):
    """Mapped over examples, in a loop of layers, with rematerialisation."""
    layer = jax.checkpoint(lambda x, w: jax.vmap(fn, (None, 0, None))(3, x[:, None], w)[:, 0])
    return lambda _, x, w: jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack([w, 2 * w]))[0]


@pytest.mark.parametrize("around", [lambda fn: fn, stacked], ids=["alone", "mapped, looped, computed again"])
def test_reverse_mode_equals_a_custom_vjp_program(around):
    gradient = lambda fn: jax.jit(jax.grad(lambda *args: around(fn)(*args).sum(), (1, 2)))
    lowered = lambda fn: gradient(fn).lower(*scan_arguments()).as_text()
    assert lowered(in_both) == lowered(by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("around", [stacked, lambda fn: fn])
def test_every_mode_is_that_of_the_plain_function(around):
    count, *arrays = scan_arguments()
    x, w = (a.astype(np.float64) for a in arrays)

    def derivatives(fn):
        loss = lambda x, w: (around(fn)(count, x, w) ** 2).sum()
        line = lambda t: loss(x, t * w)
        return lambda x, w: {
            "gradient of one": jax.grad(loss)(x, w),
            "jvp of one": jax.jvp(lambda x: loss(x, w), (x,), (jnp.cos(x),)),
            "jacfwd": jax.jacfwd(loss, 1)(x, w),
            "hessian": jax.hessian(line)(0.5),
            "rev rev": jax.grad(jax.grad(line))(0.5),
        }

    with jax.enable_x64(True):  # in float32, "rev rev" rounds by more than the tolerance on some processors
        assert_close(jax.jit(derivatives(in_both))(x, w), jax.jit(derivatives(by_scan))(x, w))


def test_chunked_vocabulary_loss_equals_a_custom_vjp_program(monkeypatch):
    """Its loop of known values is not taken apart: without `compat.where_values_are_known` this is another program."""
    x, w, targets = jnp.ones((2, 8, 4)), jnp.ones((4, 32)), jnp.zeros((2, 8), jnp.int32)

    def lowered():
        loss = lambda x, w: sk.cross_entropy(x, w, targets, chunk=8).sum()
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w).as_text()

    found = lowered()
    monkeypatch.setattr(vocab, "both_modes", as_custom_vjp)
    assert found == lowered()


def test_a_vmap_that_maps_nothing_maps_no_result():
    """As `sk.pipeline` puts around the functions of its user: only the name of an axis is new."""
    count, x, w = scan_arguments()
    loss = lambda fn: (
        lambda x, w: jax.vmap(lambda x, w: fn(count, x, w).sum(), None, None, axis_size=1, axis_name="a")(x, w)
    )
    found, right = (jax.jit(jax.grad(loss(fn), (0, 1)))(x, w) for fn in (in_both, by_hand))
    assert_close(found, right)
