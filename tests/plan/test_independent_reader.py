"""Two readers of compiled programs, written independently, agree on bytes and FLOPs of more than 30 programs."""

import gzip

import jax
import jax.numpy as jnp
import pytest

from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.step_time import predict_time
from tests.plan.independent_reader import totals
from tests.plan.known_traffic import PROGRAMS, compiled
from tests.plan.test_hlo import TEXTS

pytestmark = pytest.mark.optimized
CONVOLUTIONS = [(1, 1, "SAME"), (1, 2, "VALID"), (2, 2, "SAME")]
SAVED = sorted(path.name.removesuffix(".txt.gz") for path in TEXTS.glob("*.gz"))


def both(text):
    """Returns (bytes, FLOPs) of the package's reader and of the independent one."""
    module = parse(text)
    bill = read_bill(module, {"devices": module.num_partitions})
    flops = predict_time(parse_target("cpu:8"), module, bill, range(module.num_partitions)).hlo_flops
    num_bytes, num_flops = totals(text)
    return (bill.bytes_at_least, flops), (round(num_bytes), num_flops)


@pytest.mark.parametrize("name", SAVED)
def test_two_readers_agree_on_saved_programs(name):
    package, independent = both(gzip.decompress((TEXTS / f"{name}.txt.gz").read_bytes()).decode())
    assert package == independent
    assert max(package) > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_readers_agree_on_known_traffic(name):
    package, independent = both(compiled(name, jax.devices()).as_text())
    assert package == independent


@pytest.mark.parametrize("groups, stride, padding", CONVOLUTIONS)
def test_two_readers_agree_on_convolutions(groups, stride, padding):
    def loss(x, w):
        names = ("NHWC", "HWIO", "NHWC")
        options = {"dimension_numbers": names, "feature_group_count": groups}
        return jax.lax.conv_general_dilated(x, w, (stride,) * 2, padding, **options).sum()

    shapes = (2, 7, 6, 4), (3, 3, 4 // groups, 6)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    package, independent = both(jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile().as_text())
    assert package == independent
    assert package[1] > 0


def test_enough_programs_are_compared():
    assert len(SAVED) + len(PROGRAMS) + len(CONVOLUTIONS) >= 30
