"""What a product in float8 sends: the magnitudes of its three operands."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdkit.ops.float8 import HISTORY, float8_product
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse


def test_the_gradient_of_a_history_is_one_maximum_of_12_bytes():
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    product = jax.shard_map(float8_product, mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P("tensor"))
    gradient = jax.jit(jax.grad(lambda h, x, w: jnp.sin(product(x, w, h)).sum()))
    text = gradient.lower(jnp.zeros((3, HISTORY)), jnp.ones((16, 8)), jnp.ones((8, 4))).compile().as_text()
    (row,) = read_bill(parse(text), {"tensor": 4}).collectives
    assert row.bytes == 2 * 3 / 4 * 12
