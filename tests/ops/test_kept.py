"""What a part hands to its gradient: the same list in every trace, named by its marks, without what needs no input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from spmdkit import compat
from spmdkit.mesh import make_mesh, resolve
from spmdkit.ops.kept import Linearized
from spmdkit.ops.remat import KEPT, everything_but_gathered, policy, policy_of_names

pytestmark = pytest.mark.strict


def fn(x, w, n):
    """Its scale differs along no axis, or along the replicas, as the enclosing vmap makes it: a `pvary` more or less."""
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
    "none": everything_but_gathered,
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
    assert set(kept["none"].marks) <= {KEPT, "hidden"}
    assert (4, 4) not in [x.shape for x in kept["none"].kept], "the mask needs no input: it is computed again"
