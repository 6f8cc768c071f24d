"""The forms of `sk.attention` by the real TPU compiler, without a TPU, in a process of its own: libtpu is loaded
once."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.tpu

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding
import spmdkit as sk
from spmdkit.mesh import layout, mesh
from spmdkit.step import trace_context
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.machine.target import open_target, parse_target

devices = open_target(parse_target("tpu:v5p:2x2x2")).devices
sizes = mesh.resolve({"context": 4, "tensor": 2}, 8)
found = {}
for form in ("ring", "all_to_all"):
    record = trace_context.Context(
        trace_context.ShardingSpec(mesh=mesh.make_mesh(sizes, devices), sizes=sizes, inner_axes=("fsdp", "expert")),
        usage=trace_context.UsageTracker({"context_order"}),
        options=trace_context.StepOptions(
            logical_axes=layout.logical_axes({}), attention=trace_context.AttentionSettings(context=form)
        ),
    )
    cut = NamedSharding(record.sharding.mesh, mesh.canonical([(), ("context",), ("tensor",)], sizes))
    q = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16, sharding=cut)
    loss = lambda q, k, v, w: (sk.attention(q, k, v) * w).astype(jnp.float32).sum()
    run = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=(cut,) * 3)
    with trace_context.tracing(record):
        text = run.lower(q, q, q, q).compile().as_text()
    found[form] = {
        "bytes": sum(c.bytes for c in read_bill(parse(text), sizes).collectives),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
    }
print(json.dumps(found))
"""


def test_both_forms_compile_with_documented_communication():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    shard = 2 * 2 * 1024 * 8 * 128 // 8  # bytes of q, k or v on a device, in bfloat16
    assert found["ring"]["bytes"] == 3 * 2 * shard + 3 * (2 * shard + 4 * shard)  # dk and dv in float32
    assert found["all_to_all"]["bytes"] == 3 * 3 * shard // 4 + 3 * 4 * shard // 4  # the result itself is not needed
    assert found["ring"]["kernels"] == 3 + 2 * 4  # own block, loop, last turn; of the gradient also the first turn
    assert found["all_to_all"]["kernels"] == 3
