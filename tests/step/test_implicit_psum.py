"""Which sums of a traced function are there by JAX's types alone, and which are the function's own."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmdkit import compat
from spmdkit.mesh import mesh
from spmdkit.step.checks.implicit_psum import summed_by_types, takes_derivative


def traces(fn):
    """Returns the traces of `fn(same, own)` on 2 x 4 devices, with types and without; `own` differs along fsdp."""
    devices = mesh.make_mesh(mesh.resolve({"data": 2, "fsdp": 4}, 8), jax.devices())
    shapes = jax.ShapeDtypeStruct((6,), jnp.float32), jax.ShapeDtypeStruct((16, 6), jnp.float32)

    def probe(same, own):
        fn(same, own)
        return jnp.zeros(())

    run = lambda typed: jax.shard_map(probe, mesh=devices, in_specs=(P(), P("fsdp")), out_specs=P(), check_vma=typed)
    return [jax.make_jaxpr(run(typed))(*shapes) for typed in (True, False)]


def by_row(w, x):
    return jax.vmap(lambda row: jax.grad(lambda t: jnp.tanh(row * (1 + t) @ w))(0.0) ** 2)(x)


def hessian(w, x):
    return jax.hessian(lambda t: jnp.tanh((x + t) @ w).sum())(jnp.zeros(6))


def in_a_loop(w, x):
    inner = lambda d: jax.grad(lambda d: jnp.tanh((x + d) @ w).sum())(d)
    return lax.scan(lambda d, _: (compat.as_varying(inner(lax.psum(d, "fsdp")), ("fsdp",)), None), x[0] * 0, length=3)


def compiled(w, x):
    return jax.jit(lambda w, x: jax.grad(lambda t: jax.jit(jnp.multiply)(x @ w, t).sum())(1.0))(w, x)


def through_own_sum(w, x):
    return jax.grad(lambda t: lax.psum(jnp.tanh(x * t), "fsdp").sum())(1.0)


def beside_statistics(w, x):
    return jax.grad(lambda t: (jnp.tanh(x * t) / lax.psum((x**2).sum() * t, "fsdp")).sum())(1.0)


@pytest.mark.parametrize("fn", [by_row, hessian, in_a_loop, compiled, through_own_sum, beside_statistics])
def test_derivative_by_constant_is_found_with_line(fn):
    found = summed_by_types(*traces(fn), ("fsdp",))
    path, line, _ = found.split(":", 2)
    assert path.endswith("test_implicit_psum.py") and int(line) == fn.__code__.co_firstlineno + 1
    assert summed_by_types(*traces(fn), ("data",)) is None
    assert takes_derivative(traces(fn)[0])


def by_own(w, x):
    return jax.vmap(lambda row: jax.grad(lambda t: jnp.tanh(row * (1 + t) @ w))(row[0] * 0) ** 2)(x)


def sums_of_its_own(w, x):
    """Forward and, by their transposes, backward; without types the transpose of a sum is a sum."""
    loss = lambda x: lax.psum(jnp.tanh(x @ w), "fsdp").sum() * lax.pmean(x.sum(), "fsdp")
    return lax.psum(jax.grad(loss)(x), "fsdp")


def statistics(w, x):
    """A batch norm: what it adds up meets the examples elsewhere, three times, and there its transpose adds."""

    def loss(x):
        mean, square = lax.pmean((x.mean(0), (x**2).mean(0)), "fsdp")
        y = (x - mean) * lax.rsqrt(square - mean**2 + 1e-5) + jnp.tanh(mean)
        return (y @ w).sum()

    return jax.grad(loss)(x)


def statistics_of_a_scan(w, x):
    """The same in every layer of a stack, with remat."""

    @jax.checkpoint
    def layer(x, w):
        total = lax.psum((x**2).sum(0), "fsdp")
        return jnp.tanh(x * w) / (1 + total), total

    return jax.grad(lambda x: sum(y.sum() for y in lax.scan(layer, x, jnp.stack([w] * 3))))(x)


def forward_mode(w, x):
    return jax.jvp(lambda t: lax.psum(jnp.tanh(x @ (w + t)), "fsdp").sum(), (0.0,), (1.0,))


@pytest.mark.parametrize("fn", [by_own, sums_of_its_own, statistics, statistics_of_a_scan, forward_mode])
def test_explicit_sums_are_not_implicit(fn):
    assert summed_by_types(*traces(fn), ("data", "fsdp")) is None


def test_a_function_without_a_derivative_takes_none():
    assert not takes_derivative(traces(lambda w, x: lax.psum(x @ w, "fsdp"))[0])
    assert not takes_derivative(traces(forward_mode)[0])
