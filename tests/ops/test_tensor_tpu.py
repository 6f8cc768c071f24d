"""Pairs compiled by the real TPU compiler for a whole torus: the formula's bytes."""

import pytest

from tests.support.tpu_process import printed_json

pytestmark = pytest.mark.tpu

CODE = """
import json, sys
import jax, jax.numpy as jnp
from tests.support.ops_mesh import wire
import spmdkit as sk
from spmdkit.program import compiler
from spmdkit.plan.machine.target import open_target, parse_target

devices = open_target(parse_target("tpu:v5p:4x4x4")).devices
rows, D, F, T = ("batch", "norm_sequence", None), 512, 1024, 128
pair = lambda x, up, down: sk.column_row_parallel(x, [up], jnp.square, down)
half = "bfloat16"
args = [((64, T, D), rows, half), ((D, F), ("embed", "mlp"), half), ((F, D), ("mlp", "embed"), half)]
for own in (compiler.own_options(devices[0]), {}):
    found = wire(pair, rows, *args, backward=True, devices=devices, options=own, fsdp=64)
    print(json.dumps({" ".join(name): num for name, num in found.items()}))
"""


def test_torus_weights_are_sent_once_per_pass():
    ours, default = printed_json(CODE)
    weights = 63 / 64 * 2 * 2 * 512 * 1024
    # The forward pass gathers the first weight for the hidden values that it keeps, the backward pass both.
    assert ours == {"all_gather fsdp": 1.5 * weights, "reduce_scatter fsdp": weights}
    message = "the compiler's default has improved: see spmdkit/program/compiler.py"
    assert set(default) == {"all_gather fsdp", "all_reduce fsdp"}, message
