"""Forward mode, second order and a gradient penalty through parts: on every mesh those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops.collectives import all_gather, reduce_scatter
from spmdkit.ops.moe.blocks import by_blocks
from spmdkit.step import trace_context
from tests.support.core_runs import assert_close
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
MESHES = [{"tensor": 2}, {"fsdp": 2}, {"data": 2, "tensor": 2}]


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


def of_all(forms, quick):
    """Returns the cases of all forms and kinds; the slow ones join a form and a kind that the quick ones have apart."""
    assert {kind for kinds in quick.values() for kind in kinds} == set(KINDS)
    return [
        pytest.param(form, kind, id=f"{form}-{kind}", marks=[] if kind in quick[form] else [pytest.mark.slow])
        for form in forms
        for kind in KINDS
    ]


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


@pytest.mark.forms(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_derivatives_through_a_part_equal_one_device(op, kind):
    plain = lambda x, up, down: jnp.tanh(x @ up) @ down
    args, tangents = arrays()
    expected = KINDS[kind](loss_of(plain))(args, tangents)
    for asked in MESHES if op == "manual" else MESHES[-1:]:
        assert_close(on_mesh(kind, OPS[op], args, tangents, **asked), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_in_replicas_are_each_replicas_own(kind):
    plain = lambda x, up, down: jnp.tanh(x @ up) @ down
    args, tangents = arrays()
    cut = lambda x: x.reshape(2, -1, *x.shape[1:])
    of = lambda x, dx: KINDS[kind](loss_of(plain))((x, *args[1:]), (dx, *tangents[1:]))
    assert_close(in_replicas(kind, OPS["manual"], args, tangents), jax.vmap(of)(cut(args[0]), cut(tangents[0])))


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_a_part_that_has_been_mapped(kind):
    """The vmap inside: weights that it does not map get the sum."""
    args, tangents = arrays()
    mapped = lambda op: lambda x, up, down: jax.vmap(op, (0, None, None))(jnp.stack([x, x**2]), up, down).sum(0)
    plain = lambda x, up, down: jnp.tanh(x @ up) @ down
    expected = KINDS[kind](loss_of(mapped(plain)))(args, tangents)
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


@pytest.mark.forms(4)
@pytest.mark.parametrize(
    "form, kind",
    of_all(
        FORMS,
        {
            "tensor 2": ("jvp", "reverse over reverse"),
            "ring of 2": tuple(KINDS),
            "all_to_all": ("forward over reverse", "reverse over reverse"),
            "data 2 x tensor 2": ("forward over reverse", "reverse over forward"),
            "one device": ("jvp", "reverse over reverse"),
        },
    ),
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


@pytest.mark.parametrize("kind", KINDS)
def test_manual_form_attention_derivatives_are_per_device(kind):
    args, tangents = heads()
    cut = lambda tree: jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), tree)
    expected = jax.jit(jax.vmap(KINDS[kind](weighted(plain_attention))))(cut(args), cut(tangents))
    record = step(data=2).with_sharding(form="manual")

    def local(args, tangents):
        own = jax.tree.map(lambda x: x[0], (args, tangents))
        return jax.tree.map(lambda x: x[None], KINDS[kind](weighted(sk.attention))(*own))

    on_data = PartitionSpec("data")
    run = jax.shard_map(local, mesh=record.sharding.mesh, in_specs=on_data, out_specs=on_data)
    with trace_context.tracing(record):
        assert_close(jax.jit(run)(cut(args), cut(tangents)), expected)


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("asked", [{}, {"tensor": 2}], ids=["one device", "tensor 2"])
def test_jacobian_through_mapped_attention_in_a_loop(asked):
    """jacfwd maps the tangents and not the values; the loop and remat take the derivative of a trace."""
    args, _ = heads()

    def layers(op):
        block = jax.checkpoint(jax.vmap(op, (0, None, None)))
        loop = lambda q, k, v: jax.lax.scan(lambda q, _: (block(q, k, v), None), q, length=2)[0]
        bent = lambda t: (loop(*(jnp.stack([t[0] * x]) for x in args[:1]), *(t[1] * x for x in args[1:])) ** 2).sum(
            (0, 1, 2)
        )
        return lambda t: (jax.jacfwd(bent)(t), jax.linearize(bent, t)[1](t), jax.jacrev(bent)(t))

    t = np.array([0.5, 1.5], np.float32)
    expected = jax.jit(layers(plain_attention))(t)
    found = on_mesh_of(layers(sk.attention), t, **asked) if asked else jax.jit(layers(sk.attention))(t)
    assert_close(found, expected)


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


@pytest.mark.forms(4)
@pytest.mark.parametrize(
    "op, kind",
    of_all(
        OTHERS,
        {
            "cross_entropy": tuple(KINDS),
            "moe with capacity": ("jvp", "reverse over reverse"),
            "moe": ("forward over reverse", "reverse over forward"),
        },
    ),
)
def test_derivatives_through_other_ops_equal_one_device(op, kind):
    """Their parts have integer results, and sums and maxima over devices."""
    loss, plain, shapes, asked = OTHERS[op]
    rng = np.random.default_rng(0)
    args, tangents = (tuple(rng.normal(size=s).astype(np.float32) / 2 for s in shapes) for _ in range(2))
    expected = jax.jit(KINDS[kind](plain))(args, tangents)
    assert_close(jax.jit(KINDS[kind](loss))(args, tangents), expected)
    assert_close(on_mesh_of(KINDS[kind](loss), args, tangents, **asked), expected)


def test_second_derivative_of_unused_experts_is_zero():
    rng = np.random.default_rng(0)
    rows, cotangents, weights = (rng.normal(size=s).astype(np.float32) for s in ((24, 4), (24, 4), (2, 4, 4)))
    sizes, expert = jnp.array([5, 6]), np.repeat([0, 1, 2], [5, 6, 13])

    def slope(run):
        of_weights = lambda c: jax.vjp(lambda w: run(w, rows), weights)[1](c)[0]
        return jax.grad(lambda c: (jnp.cos(weights) * of_weights(c)).sum())(cotangents)

    found = slope(lambda w, x: by_blocks(lambda _, w, x: jnp.exp((x + 1) @ w), 8, (), w, x, sizes))
    plain = lambda w, x: (
        jnp.exp(jnp.einsum("rd,rdf->rf", x + 1, w[np.minimum(expert, 1)])) * jnp.float32(expert < 2)[:, None]
    )
    assert_close(found, slope(plain))


@pytest.mark.parametrize("implementation, platform", [("splash", "tpu"), ("cudnn", "cuda")])
def test_forward_mode_through_a_kernel_is_refused(implementation, platform):
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    loss = lambda q: sk.attention(q, q, q, implementation=implementation)
    with pytest.raises(ConfigError, match=r"forward mode.*kernel.*implementation: xla\}"):
        jax.jit(lambda q: jax.jvp(loss, (q,), (q,))).trace(q).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("implementation", ["splash", "cudnn"])
def test_a_second_derivative_through_a_kernel_is_refused(implementation):
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    loss = lambda q: sk.attention(q, q, q, implementation=implementation).astype(jnp.float32).sum()
    with pytest.raises(ConfigError, match=r"second derivative.*kernel.*implementation: xla\}"):
        jax.eval_shape(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum().astype(jnp.float32)), q)
