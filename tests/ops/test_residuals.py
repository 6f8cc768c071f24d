"""What a part hands to its gradient: the same list in every trace, named by its marks, without what needs no input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit import compat
from spmdkit.foundation import jaxprs
from spmdkit.mesh.mesh import make_mesh, resolve
from spmdkit.ops.collectives import all_gather, reduce_scatter
from spmdkit.ops.remat import RESIDUAL_NAME, policy, policy_of_names, save_all_but_gathered
from spmdkit.ops.residuals import Linearized
from spmdkit.step import trace_context
from tests.support.ops_mesh import step


def fn(x, w, n):
    """Its scales differ along no axis, or along the replicas, as the enclosing vmap makes them: a `pvary` more or less,
    and in jax 0.12 a rounding of each constant that is varied."""
    w = w * (1 + 0.5 * jnp.sin(jax.lax.psum(w, "fsdp")))
    whole = jax.lax.all_gather(w, "fsdp", tiled=True)
    h = checkpoint_name(jnp.sin(x @ whole), "hidden")
    mask = jnp.tril(jnp.ones((4, 4))) * jnp.cos(jnp.arange(4.0))
    return (jnp.tanh(mask @ h) * jnp.exp(n.astype(jnp.float32)), n + 1)


def linearized(asked, over=()):
    """Returns the trace on one device's shards, all of which are typed as differing along `over`."""
    found = []

    def run(*shards):
        shards = compat.as_varying(shards, over)
        found[:] = [Linearized(fn, shards, asked)]
        return found[0].forward(shards)[0][0]

    rng = np.random.default_rng(0)
    args = rng.normal(size=(32, 8)), rng.normal(size=(8, 6)), np.int32(1)
    mesh, rows = make_mesh(resolve({"data": 2, "fsdp": 4}, 8), jax.devices()), P(("data", "fsdp"))
    jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=(rows, P("fsdp"), P()), out_specs=rows), *args)
    return found[0]


POLICIES = {
    "none": save_all_but_gathered,
    "dots": policy("dots").in_parts,
    "full": policy("full").in_parts,
    "names": policy_of_names(["hidden"], []).in_parts,
}


@pytest.mark.parametrize("asked", POLICIES)
def test_a_trace_with_other_types_keeps_the_same(asked):
    one, other = (linearized(POLICIES[asked], over) for over in ((), ("data", "fsdp")))
    assert one.made_by == other.made_by
    assert one.marks == other.marks


def test_what_is_kept_is_what_the_policy_says():
    kept = {name: linearized(asked) for name, asked in POLICIES.items()}
    assert kept["full"].made_by == []
    assert (kept["names"].marks, [x.shape for x in kept["names"].kept]) == (["hidden"], [(4, 6)])
    assert [x.shape for x in kept["dots"].kept] == [(4, 6), (4, 6)]
    assert "all_gather" not in {name for _, _, name in kept["none"].made_by}
    assert set(kept["none"].marks) <= {RESIDUAL_NAME, "hidden"}
    assert (4, 4) not in [x.shape for x in kept["none"].kept], "the mask needs no input: it is computed again"


# ---- the example of docs/why/manual_and_residuals.md

ROWS = ("batch", "norm_sequence", None)


def pair(x_BTD, up_DF, down_FD):
    x_BTD = all_gather(x_BTD, "mlp", dim=1)
    up_DF, down_FD = all_gather(up_DF, "embed", dim=0), all_gather(down_FD, "embed", dim=1)
    return reduce_scatter(jax.nn.gelu(x_BTD @ up_DF) @ down_FD, "mlp", dim=1)


def counted(part, operands):
    """Returns the numbers of (gathers, scatters, sums, products) that a device runs in a part."""
    found = [e.primitive.name for e in jaxprs.equations(jax.make_jaxpr(part.run)(*operands))]
    sums = sum(name.startswith("psum") for name in found)
    return found.count("all_gather"), found.count("reduce_scatter"), sums, found.count("dot_general")


def kept_by_jax():
    """Returns how many values of [4, 8, 32] JAX's own gradient of gelu saves: 6, and 5 in jax 0.12."""
    x, up, down = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4, 8, 16), (16, 32), (32, 16)))
    residuals = jax.eval_shape(lambda *args: jax.vjp(lambda x, u, d: jax.nn.gelu(x @ u) @ d, *args)[1], x, up, down)
    return [x.shape for x in jax.tree.leaves(residuals)].count((4, 8, 32))


@pytest.mark.parametrize("remat, num_kept, products", [("none", kept_by_jax(), 4), ("dots", 1, 4), ("full", 0, 5)])
def test_design_note_example_matches(remat, num_kept, products):
    record = step(data=2, fsdp=2, tensor=2).with_sharding(form="mapped").with_options(remat=policy(remat))
    op = sk.manual(pair, [ROWS, ("embed", "mlp"), ("mlp", "embed")], ROWS)
    of_one = jax.grad(lambda x, up, down: (op(x, up, down) ** 2).sum(), argnums=(0, 1, 2))
    of_all = jax.vmap(of_one, (0, None, None), spmd_axis_name="data")
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, 8, 8, 16), (16, 64), (64, 16))]
    with trace_context.tracing(record):
        traced = jax.make_jaxpr(of_all)(*shapes).jaxpr
    forward, backward = [e for e in jaxprs.equations(traced) if e.primitive.name == "spmdkit_manual"]
    y, *kept = (var.aval.shape for var in forward.outvars)
    assert y == (2, 8, 8, 16) and kept == [(2, 4, 4, 8, 32)] * num_kept
    assert [var.aval.shape for var in backward.outvars] == [(2, 8, 8, 16), (2, 16, 64), (2, 64, 16)]
    ran = [counted(e.params["part"], [var.aval for var in e.invars]) for e in (forward, backward)]
    assert ran == [(3, 1, 0, 2), (4, 3, 0, products)]
