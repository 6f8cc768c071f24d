"""Offloaded values really are in the host's memory: as the TPU compiler allocates them."""

import pytest

from tests.support.tpu_process import printed_json

pytestmark = pytest.mark.tpu

CODE = """
import json
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.support.ops_mesh import step
from spmdkit.ops.remat import policy_of_names
from spmdkit.plan.machine.target import open_target, parse_target

record = step(devices=open_target(parse_target("tpu:v5e:2x2")).devices, fsdp=4)
on = lambda *spec: NamedSharding(record.sharding.mesh, P(*spec))
x = jax.ShapeDtypeStruct((4096, 512), jnp.float32, sharding=on("fsdp"))
w = jax.ShapeDtypeStruct((16, 512, 2048), jnp.float32, sharding=on())
for names in ({"save": ["hidden"], "offload": []}, {"save": [], "offload": ["hidden"]}):
    block = lambda x, w: (jnp.tanh(checkpoint_name(jnp.sin(x @ w), "hidden") @ w.T), None)
    kept = jax.checkpoint(block, policy=policy_of_names(**names).of_block)
    loss = lambda w, x: (jax.lax.scan(kept, x, w)[0] ** 2).sum()
    memory = jax.jit(jax.grad(loss)).lower(w, x).compile().memory_analysis()
    print(json.dumps([memory.temp_size_in_bytes, memory.host_temp_size_in_bytes]))
"""


def test_offloaded_values_use_host_memory_only():
    (saved, none_on_host), (left, on_host) = printed_json(CODE)
    hidden = 16 * (4096 // 4) * 2048 * 4
    assert (none_on_host, on_host) == (0, hidden)
    assert (
        saved > 0.4 * hidden > 4 * left
    )  # what is kept on the device only feeds products, and XLA keeps it in bfloat16
