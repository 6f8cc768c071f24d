"""Forward mode, second order and a gradient penalty through parts: on every mesh those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_runs import assert_close
from jax.sharding import NamedSharding, PartitionSpec
from ops_mesh import step

import spmdkit as sk
from spmdkit import scope
from spmdkit.errors import ConfigError
from spmdkit.ops.collectives import all_gather, reduce_scatter

B, T, D, F = 4, 4, 8, 16
ROWS = ("batch", "norm_sequence", None)
DIMS = [ROWS, ("embed", "mlp"), ("mlp", "embed")]


def pair(x, up, down):
    x = all_gather(x, "mlp", dim=1)
    up, down = all_gather(up, "embed", dim=0), all_gather(down, "embed", dim=1)
    return reduce_scatter(jnp.tanh(x @ up) @ down, "mlp", dim=1)


OPS = {
    "manual": sk.manual(pair, DIMS, ROWS),
    "column_row": lambda x, up, down: sk.column_row(x, [up], jnp.tanh, down),
}
MESHES = [{"tensor": 2}, {"fsdp": 2}, {"data": 2, "tensor": 2}]


def loss_of(op):
    return lambda x, up, down: (op(x, up, down) ** 2 * jnp.cos(jnp.arange(T * D).reshape(T, D))).sum()


def penalty(loss):
    """The gradient of the norm of a gradient."""
    norm = lambda *args: sum((g**2).sum() for g in jax.grad(loss, (0, 1))(*args))
    return lambda args, tangents: jax.grad(norm, (0, 1, 2))(*args)


KINDS = {
    "jvp": lambda loss: lambda args, tangents: jax.jvp(loss, args, tangents),
    "forward over reverse": lambda loss: lambda args, tangents: jax.jvp(jax.grad(loss, (0, 1, 2)), args, tangents),
    "reverse over forward": lambda loss: (
        lambda args, tangents: jax.grad(lambda *args: jax.jvp(loss, args, tangents)[1], (0, 1, 2))(*args)
    ),
    "reverse over reverse": penalty,
}


def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 2
    return [(draw(B, T, D), draw(D, F), draw(F, D)) for _ in range(2)]


def on_mesh(kind, op, args, tangents, **asked):
    record = step(**asked)
    whole = lambda tree: jax.device_put(tree, NamedSharding(record.mesh, PartitionSpec()))
    with scope.tracing(record):
        return jax.jit(KINDS[kind](loss_of(op)))(whole(args), whole(tangents))


def in_replicas(kind, op, args, tangents):
    """The mapped form: the weights are the same on both replicas, each has its own examples."""
    record = step(data=2, tensor=2)
    args, tangents = jax.device_put((args, tangents), NamedSharding(record.mesh, PartitionSpec()))

    def one(x, dx):
        return KINDS[kind](loss_of(op))((x, *args[1:]), (dx, *tangents[1:]))

    cut = lambda x: x.reshape(2, -1, *x.shape[1:])
    with scope.tracing(record):
        return jax.jit(jax.vmap(one, axis_name="data", spmd_axis_name="data"))(cut(args[0]), cut(tangents[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_derivatives_through_a_part_are_those_of_one_device(op, kind):
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


@pytest.mark.parametrize("kind", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("asked", [{"tensor": 2}, {"context": 2}], ids=["tensor 2", "ring of 2"])
def test_second_derivatives_through_attention_are_those_of_one_device(asked, kind):
    rng = np.random.default_rng(0)
    draw = lambda: tuple(rng.normal(size=(2, 8, 2, 4)).astype(np.float32) for _ in range(3))
    args, tangents = draw(), draw()
    weighted = lambda op: lambda *args: (op(*args) ** 2 * jnp.arange(1, 5)).sum()
    expected = KINDS[kind](weighted(plain_attention))(args, tangents)
    in_order = lambda *args: sk.context_restore(sk.attention(*sk.context_order(args)))
    record = step(**asked)
    whole = lambda tree: jax.device_put(tree, NamedSharding(record.mesh, PartitionSpec()))
    with scope.tracing(record):
        found = jax.jit(KINDS[kind](weighted(in_order)))(whole(args), whole(tangents))
    assert_close(found, expected)


def mixture(x, router, up, down):
    y, load = sk.moe(x, router, {"up": up, "down": down}, top_k=2, capacity=1.25)
    return (y**2).sum() + load.balance_B.sum()


def loss_of_tokens(hidden, head):
    return sk.cross_entropy(hidden, head, jnp.arange(16, dtype=jnp.int32).reshape(4, 4)).sum()


HEAD, EXPERTS = [(4, 4, D), (D, 16)], [(4, 4, D), (D, 4), (4, D, F), (4, F, D)]


@pytest.mark.parametrize("kind", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize(
    "loss, shapes, asked", [(loss_of_tokens, HEAD, {"tensor": 2}), (mixture, EXPERTS, {"expert": 2})]
)
def test_second_derivatives_through_other_ops_are_those_of_one_device(loss, shapes, asked, kind):
    """Their parts have integer results, and sums and maxima over devices."""
    rng = np.random.default_rng(0)
    args, tangents = (tuple(rng.normal(size=s).astype(np.float32) for s in shapes) for _ in range(2))

    def run(args, tangents):
        slope = jax.grad(loss, range(len(args)))
        if kind == "forward over reverse":
            return jax.jvp(slope, args, tangents)[1]
        return jax.grad(lambda args: sum((x * d).sum() for x, d in zip(slope(*args), tangents, strict=True)))(args)

    expected = jax.jit(run)(args, tangents)
    record = step(**asked)
    with scope.tracing(record):
        given = jax.device_put((args, tangents), NamedSharding(record.mesh, PartitionSpec()))
        assert_close(jax.jit(run)(*given), expected)


@pytest.mark.parametrize("implementation", ["splash", "cudnn"])
def test_a_second_derivative_through_a_kernel_is_refused(implementation):
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    loss = lambda q: sk.attention(q, q, q, implementation=implementation).astype(jnp.float32).sum()
    with pytest.raises(ConfigError, match=r"second derivative.*kernel.*implementation: xla\}"):
        jax.eval_shape(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum().astype(jnp.float32)), q)
