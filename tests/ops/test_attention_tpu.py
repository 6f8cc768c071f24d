"""The forms of `sk.attention` by the real TPU compiler, without a TPU, in a process of its own: libtpu is loaded
once."""

import pytest

from tests.support.tpu_process import printed_json

pytestmark = pytest.mark.tpu

PROGRAM = """
import json
import jax, jax.numpy as jnp
import spmdkit as sk
from spmdkit.step import trace_context
from spmdkit.plan.machine.target import open_target, parse_target
from tests.support.ops_mesh import sent_by, sharding_of, step

devices = open_target(parse_target("tpu:v5p:2x2x2")).devices
for form in ("ring", "all_to_all"):
    record = step(trace_context.AttentionSettings(context=form), devices=devices, context=4, tensor=2)
    record.usage.record_call("context_order")
    cut = sharding_of(record, (None, "sequence", "heads"))
    q = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16, sharding=cut)
    loss = lambda q, k, v, w: (sk.attention(q, k, v) * w).astype(jnp.float32).sum()
    run = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=(cut,) * 3)
    with trace_context.tracing(record):
        compiled = run.lower(q, q, q, q).compile()
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    print(json.dumps([sum(sent_by(compiled, record).values()), kernels]))
"""


def test_both_forms_compile_with_documented_communication():
    ring, all_to_all = printed_json(PROGRAM)
    shard = 2 * 2 * 1024 * 8 * 128 // 8  # bytes of q, k or v on a device, in bfloat16
    # dk and dv in float32; the result itself is not needed. Kernels: the own block, the loop, the last turn; of the
    # gradient also the first turn.
    assert ring == [3 * 2 * shard + 3 * (2 * shard + 4 * shard), 3 + 2 * 4]
    assert all_to_all == [3 * 3 * shard // 4 + 3 * 4 * shard // 4, 3]
