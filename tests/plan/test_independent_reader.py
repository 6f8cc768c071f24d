"""Two readers of compiled programs, written independently, agree on bytes and FLOPs of 30 programs."""

import gzip

import jax
import jax.numpy as jnp
import pytest

from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.step_time import predict_time
from tests.plan.independent_reader import Program
from tests.plan.known_traffic import PROGRAMS, compiled
from tests.plan.test_hlo import TEXTS

ATTENTION = {"gpt_h100": 4 * 7 * 16 * 512**2 * 64}  # by cuDNN: 4 layers, 2 + 5 causal products of 16 x 512 x 512 x 64
CONVOLUTIONS = [(1, 1, "SAME"), (1, 2, "VALID"), (2, 2, "SAME")]
SAVED = sorted(path.name.removesuffix(".txt.gz") for path in TEXTS.glob("*.gz"))


def package_totals(text):
    """Returns (bytes that a device sends, FLOPs) by the package's reader."""
    module = parse(text)
    bill = read_bill(module, {"devices": module.num_partitions})
    flops = predict_time(parse_target("cpu:8"), module, bill, range(module.num_partitions)).hlo_flops
    return bill.bytes_at_least, flops


@pytest.mark.parametrize("name", SAVED)
def test_two_readers_agree_on_saved_programs(name):
    text = gzip.decompress((TEXTS / f"{name}.txt.gz").read_bytes()).decode()
    num_bytes, flops = Program(text).totals()
    assert package_totals(text) == (num_bytes, flops + ATTENTION.get(name, 0))
    assert max(num_bytes, flops) > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_readers_agree_on_known_traffic(name):
    text = compiled(name, jax.devices()).as_text()
    assert package_totals(text) == Program(text).totals()


@pytest.mark.parametrize("groups, stride, padding", CONVOLUTIONS)
def test_flops_of_convolutions_are_those_of_xla(groups, stride, padding):
    def loss(x, w):
        names = ("NHWC", "HWIO", "NHWC")
        options = {"dimension_numbers": names, "feature_group_count": groups}
        return jax.lax.conv_general_dilated(x, w, (stride,) * 2, padding, **options).sum()

    shapes = (2, 7, 6, 4), (3, 3, 4 // groups, 6)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile()
    assert package_totals(program.as_text())[1] == program.cost_analysis()["flops"] > 0


def test_enough_programs_are_compared():
    assert len(SAVED) + len(PROGRAMS) >= 30
