"""A mixture of experts compiled by the real TPU compiler. In a process of its own: libtpu is loaded once."""

import pytest

from tests.support.tpu_process import printed_json

pytestmark = [pytest.mark.tpu, pytest.mark.slow]

CODE = """
import json
from tests.ops import test_moe_wire as t
from tests.support.ops_mesh import wire
from spmdkit.program import compiler
from spmdkit.plan.machine.target import open_target, parse_target

devices = open_target(parse_target("tpu:v5p:2x2x2")).devices
own = compiler.own_options(devices[0])
t.T, t.D, t.F, t.WIDTH = 256, 256, 512, 2
up, down = ((t.E, t.D, t.F), t.UP[1], "bfloat16"), ((t.E, t.F, t.D), t.DOWN[1], "bfloat16")
arguments = [((t.B, t.T, t.D), t.ROWS, "bfloat16"), ((t.D, t.E), ("embed", None), "bfloat16"), up, up, down]
for capacity, asked in ((1.25, {"fsdp": 2, "expert": 2, "context": 2}), (None, {"expert": 8})):
    found = wire(t.mixture(capacity), t.ROWS, *arguments, backward=True, devices=devices, options=own, **asked)
    formula = t.formula(capacity, True, **asked)
    print(json.dumps([{" ".join(name): num for name, num in bill.items()} for bill in (found, formula)]))
"""


@pytest.fixture(scope="module")
def bills():
    return printed_json(CODE)


def test_capacity_sends_the_formulas_bytes(bills):
    found, formula = bills[0]
    assert found["all_to_all expert"] == formula["all_to_all expert"]
    assert sum(found.values()) == pytest.approx(sum(formula.values()), rel=0.01)


def test_dropless_rows_are_sent_and_not_gathered(bills):
    found, gathered = bills[1]
    assert "ragged_all_to_all expert" in found
    assert not {"all_gather expert", "reduce_scatter expert"} & set(found)
    assert found["all_reduce expert"] <= 1.1 * gathered["all_reduce expert"]  # the router's gradient, and the sizes
