"""What programs of several CPU processes send instead of a reduce-scatter, which spoils every later all-reduce there
(`spmdkit.compat`)."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from spmdkit import compat

GROUPS = [[0, 1], [2, 3]]
ALL = PartitionSpec(("a", "b"))


def mean_square_of_all(x):
    return lax.psum((lax.all_gather(x, "b", axis=0, tiled=True) ** 2).sum(), ("a", "b"))


PROGRAMS = {
    "tiled, two axes": lambda x: lax.psum_scatter(x, ("a", "b"), scatter_dimension=1, tiled=True),
    "a dim of its own": lambda x: lax.psum_scatter(x[:, :4], "b", scatter_dimension=1),
    "groups": lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, axis_index_groups=GROUPS, tiled=True),
    "half precision": lambda x: lax.psum_scatter(x.astype("bfloat16"), "b", scatter_dimension=1, tiled=True),
    "integers": lambda x: lax.psum_scatter((x * 100).astype("int32"), "b", scatter_dimension=1, tiled=True),
    "mapped": jax.vmap(lambda x: lax.psum_scatter(x, "b", tiled=True)),
    "the derivative of a gather": jax.grad(mean_square_of_all),
}


@pytest.fixture
def restored():
    """The rule is registered for the process; this one has other tests to run."""
    rules = mlir._platform_specific_lowerings["cpu"]
    before = dict(rules)
    yield
    rules.clear()
    rules.update(before)


def compiled(name):
    mesh = compat.auto_mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    mapped = jax.shard_map(
        lambda x: PROGRAMS[name](x), mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=name != "groups"
    )
    x = np.random.default_rng(0).normal(size=(8, 16, 3)).astype(np.float32)
    program = jax.jit(mapped).lower(x).compile()
    return program.as_text(), np.asarray(program(x), np.float32)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="what JAX does itself is right from 0.12 on")
@pytest.mark.forms(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_without_reduce_scatter_are_equal(restored, name):
    text, values = compiled(name)
    assert "reduce-scatter" in text
    compat.lower_reduce_scatter_as_all_to_all()
    other_text, others = compiled(name)
    assert "reduce-scatter" not in other_text and "all-to-all" in other_text
    atol = 0.05 if name == "half precision" else 1e-6  # there each sum is rounded, here the last one
    np.testing.assert_allclose(others, values, rtol=1e-6, atol=atol)
