"""`kernel`: one operation for whatever sends nothing, typed like its operands, also under a vmap of the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from spmdkit import compat
from spmdkit.ops.kernel import kernel
from spmdkit.plan.flops import count


def scaled(x, w):
    """A Pallas kernel that says nothing of mesh axes or of its cost."""

    def body(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] * w_ref[...]

    return pallas.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)


def test_a_kernel_runs_where_arrays_carry_their_axes():
    mesh = compat.auto_mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    x, w = jnp.arange(64.0).reshape(8, 8), jnp.arange(8.0).reshape(1, 8)

    def body(x, w):
        out = kernel(scaled, 1.0)(x, jnp.broadcast_to(w, x.shape))
        assert compat.varying_axes(out) == {"a", "b"}
        # A carry of a loop has to keep its type: this would fail for a result that lost its axes.
        return jax.lax.scan(lambda c, _: (c + out, None), x * 0, length=2)[0]

    cut = PartitionSpec("a", "b")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(cut, PartitionSpec(None, "b")), out_specs=cut))
    np.testing.assert_allclose(run(x, w), 2 * x * w)


def test_user_vmap_maps_kernel_and_cost():
    x, w = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(12.0).reshape(3, 4)
    mapped = jax.vmap(kernel(scaled, 5.0), in_axes=(0, None))
    np.testing.assert_allclose(jax.jit(mapped)(x, w), x * w)
    np.testing.assert_allclose(jax.vmap(kernel(scaled, 5.0), in_axes=(1, 0))(x.transpose(1, 0, 2), x), x * x)
    assert count(jax.make_jaxpr(mapped)(x, w)).products == 10
