"""A gradient that XLA's partitioner gets wrong is refused; the ones beside it run, and are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.core_runs import program_of

IMAGES = np.random.default_rng(0).normal(size=(8, 8, 8, 4)).astype(np.float32)
WHOLE, HEIGHT, CHANNELS = (("batch", None, None, None), ("batch", "sequence", None, None), ("batch", None, None, "mlp"))


def max_pool(x, window, stride):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), "SAME")


def task(window, stride, *cuts, pool=max_pool):
    """Returns the task of one pool, its operand cut in the ways `cuts`, one after another."""

    def loss_fn(params, batch, key):
        x = batch * params
        for cut in cuts:
            x = jnp.tanh(x)
            x = sk.shard(x, *cut)
        y = pool(x, window, stride)
        return sk.mean((y * jnp.cos(y)).sum((1, 2, 3)))

    return sk.Task(
        lambda key: jnp.full((8, 8, 4), 0.7), loss_fn, optax.sgd(1.0), IMAGES, rules=[("", [None, None, "mlp"])]
    )


def gradient(task, **mesh):
    """Returns the gradient of the first step."""
    program = program_of(task, batch_size=8, steps=1, data={"shuffle": False}, mesh=mesh)
    state = program.init()
    before = jax.device_get(state.params)
    (_, batch), *_ = program.batches()
    return before - jax.device_get(program.step(state, batch)[0].params)


@pytest.mark.forms(3)
@pytest.mark.parametrize("mesh", [{"context": 2}, {"data": 2, "context": 4}], ids=str)
@pytest.mark.parametrize(("window", "stride"), [(3, 1), (2, 1), (4, 2)])
def test_pools_with_large_overlap_are_rejected(mesh, window, stride):
    with pytest.raises(ConfigError) as raised:
        program_of(task(window, stride, HEIGHT), batch_size=8, mesh=mesh)
    text = str(raised.value)
    dim = 3 if "data" in mesh else 1  # behind those of the replicas
    assert f"windows of {window} every {stride} along dim {dim}" in text
    assert "over context" in text and "sk.shard(x" in text and "test_xla_pool.py" in text


def test_a_pool_far_from_constraints_is_rejected():
    def pool(x, window, stride):
        return max_pool(jnp.tanh(x), window, stride)

    with pytest.raises(ConfigError, match="XLA silently computes a wrong gradient"):
        program_of(task(3, 1, HEIGHT, pool=pool), batch_size=8, mesh={"context": 2})


@pytest.mark.parametrize(
    ("mesh", "window", "stride", "cuts"),
    [
        ({"data": 2, "context": 2}, 3, 1, (HEIGHT, WHOLE)),
        ({"context": 2}, 3, 2, (HEIGHT,)),
        ({"data": 2, "tensor": 2}, 3, 1, (CHANNELS,)),
    ],
    ids=str,
)
def test_other_pools_are_not_refused_and_are_right(mesh, window, stride, cuts):
    one = gradient(task(window, stride, *cuts))
    np.testing.assert_allclose(gradient(task(window, stride, *cuts), **mesh), one, atol=1e-5)


def test_sum_pools_over_sharded_dims_are_accepted():
    def pool(x, window, stride):
        return lax.reduce_window(x, 0.0, lax.add, (1, window, 1, 1), (1, stride, 1, 1), "SAME")

    program_of(task(3, 1, HEIGHT, pool=pool), batch_size=8, mesh={"context": 2})


def test_xla_still_gets_that_gradient_wrong():
    """When this fails the defect is repaired: say from which version on, and let newer ones pass."""
    mesh = jax.make_mesh((4,), ("c",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "c"))
    weight = jnp.cos(jnp.arange(IMAGES.size, dtype=jnp.float32)).reshape(IMAGES.shape)
    wrong = {}
    for window, stride in ((3, 1), (3, 2)):
        g = jax.grad(lambda x, w=window, s=stride: (max_pool(x, w, s) * weight[:, ::s, ::s]).sum())
        here = jax.jit(g, in_shardings=cut, out_shardings=whole)(IMAGES)
        wrong[window, stride] = bool(np.abs(np.asarray(here) - np.asarray(jax.jit(g)(IMAGES))).max() > 1e-3)
    assert wrong == {(3, 1): True, (3, 2): False}
