"""The arithmetic of a jaxpr against numbers counted by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit import compat
from spmdkit.mesh.layout import logical_axes
from spmdkit.mesh.mesh import make_mesh, resolve
from spmdkit.ops.collectives import all_gather, reduce_scatter
from spmdkit.ops.remat import policy
from spmdkit.plan.flops import collective_bytes, count
from spmdkit.step import trace_context


def arithmetic(fn, *shapes):
    return count(jax.jit(fn).trace(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr)


def layers(x, w):
    return jax.lax.scan(lambda c, wl: (jnp.tanh(c @ wl), None), x, w)[0].sum()


def test_scans_in_scans_multiply():
    def twice(x, w):
        return jax.lax.scan(lambda c, _: (c + layers(x, w), None), 0.0, length=3)[0]

    assert arithmetic(twice, (4, 8), (5, 8, 8)).products == 3 * 2 * 4 * 8 * 8 * 5


def test_bytes_of_explicit_collectives():
    mesh = make_mesh(resolve({"context": 4, "data": 2}, 8, 1), jax.devices())

    def ring(x):  # float32[2, 8] per device
        step = lambda c, _: (jax.lax.ppermute(c, "context", [(i, (i + 1) % 4) for i in range(4)]), None)
        x = jax.lax.scan(step, x, length=3)[0]
        x = jax.lax.psum(x, "data") + jax.lax.psum_scatter(jnp.tile(x, (4, 1)), "context", tiled=True)
        return jax.lax.psum(x, "context")

    mapped = jax.shard_map(ring, mesh=mesh, in_specs=P(("data", "context")), out_specs=P(), check_vma=False)
    found = collective_bytes(jax.jit(mapped).trace(jax.ShapeDtypeStruct((16, 8), jnp.float32)).jaxpr, ("context",))
    assert found == {("context",): 8 * 4 * 2 * 8 * (3 + 4 + 2)}


def test_a_gradient_counts_what_remat_computes_again():
    one = 2 * 4 * 8 * 8 * 5
    assert arithmetic(jax.grad(layers, (0, 1)), (4, 8), (5, 8, 8)).products == 3 * one

    def recomputed(x, w):
        body = jax.checkpoint(lambda c, wl: (jnp.tanh(c @ wl), None), policy=jax.checkpoint_policies.nothing_saveable)
        return jax.lax.scan(body, x, w)[0].sum()

    assert arithmetic(jax.grad(recomputed, (0, 1)), (4, 8), (5, 8, 8)).products == 4 * one


def test_inside_shard_map_every_device_counts():
    mesh = compat.auto_mesh(np.array(jax.devices()), ("data",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    def product(x, w):
        return x @ w

    assert arithmetic(product, (16, 8), (8, 8)).products == 2 * 16 * 8 * 8


def test_a_convolution_leaves_padding_out():
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    taps = (3 * 5 - 2) * (3 * 5 - 2)  # of 5 x 5 positions; the two ends of each row and column miss one tap
    assert arithmetic(conv, (2, 5, 5, 4), (3, 3, 4, 6)).products == 2 * 2 * 6 * 4 * taps


def test_loops_of_unknown_length_and_branches():
    def loop(x):
        return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ c, x)

    assert arithmetic(loop, (4, 4)).products == 2 * 4**3
    branch = lambda x: jax.lax.cond(x.sum() > 0, lambda y: y @ y @ y, lambda y: y + 1, x)
    assert arithmetic(branch, (4, 4)).products == 2 * 2 * 4**3


def test_without_products_everything_counts():
    found = arithmetic(lambda x: (x * 2 + 1).sum(), (8,))
    assert (found.products, found.flops) == (0, 3 * 8)


@pytest.mark.parametrize(("remat", "forwards"), [("none", 3), ("full", 3.5)])
def test_the_gradient_of_a_manual_part(remat, forwards):
    def fn(x, w):
        return reduce_scatter(jax.nn.relu(all_gather(x, "mlp", 1) @ w) @ w.T, "mlp", 1)

    def step(x, w):
        part = sk.manual(fn, [("batch", "mlp", None), (None, "mlp")], ("batch", "mlp", None))
        with trace_context.tracing(record):
            return jax.grad(lambda x, w: part(x, w).sum(), (0, 1))(x, w)

    sizes = resolve({"fsdp": 2, "tensor": 4}, 8)
    mesh = make_mesh(sizes, jax.devices())
    record = trace_context.Context(
        trace_context.ShardingSpec(mesh=mesh, sizes=sizes, inner_axes=("fsdp",)),
        options=trace_context.StepOptions(logical_axes=logical_axes({}), remat=policy(remat)),
    )
    jaxpr = jax.make_jaxpr(step)(jnp.ones((4, 8, 16)), jnp.ones((16, 32)))
    forward = 2 * 2 * 4 * 8 * 16 * 32
    assert count(jaxpr).products == forwards * forward
