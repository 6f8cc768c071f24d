"""The bill says which strategy asked for a collective, and what is sent along each axis."""

import pytest
from bad_programs import error, task
from core_runs import program_of

import spmdkit as sk
from spmdkit.plan.cause import CAUSES
from spmdkit.testing import bill_of

P = 2 * 256 * 512 * 4
RULES = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]


def loss(params, batch, key):
    x = sk.shard(batch["x"], "batch", None)
    h = sk.shard(x @ params["up"], "batch", "mlp") * 2
    return error(sk.shard(h @ params["down"], "batch", None), batch)


SUMS = 2 * 7 * 4 // 8
"""The sum of the losses, one float32; the count is known without a sum. Part of the gradient's all_reduce where there is one."""

CASES = {
    "mirrored": ({"mesh": {"data": 8}}, {"gradient reduction": 2 * 7 * P // 8 + SUMS}),
    "hierarchical": ({"mesh": {"replica": 2, "data": 4}}, {"gradient reduction": 2 * 7 * P // 8 + SUMS}),
    "accumulated": ({"mesh": {"data": 8}, "microbatches": 4}, {"gradient reduction": 2 * 7 * P // 8 + SUMS}),
    "zero 1": (
        {"mesh": {"fsdp": 8}, "layout": {"zero": 1}},
        {"gradient reduction": 2 * 7 * P // 8 + SUMS, "update gather": 7 * P // 8},
    ),
    "zero 2": (
        {"mesh": {"fsdp": 8}, "layout": {"zero": 2}},
        {"gradient scatter": 7 * P // 8, "metrics": SUMS, "update gather": 7 * P // 8},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_strategy_sends_what_it_has_to_and_the_bill_says_why(case):
    settings, expected = CASES[case]
    bill = bill_of(program_of(task(loss, rules=RULES), batch_size=512, **settings))
    assert bill.by_cause() == expected
    assert bill.bytes == sum(expected.values()) == sum(row.bytes for row in bill.rows)
    assert {c.cause for c in bill.collectives} <= set(CAUSES)


def test_a_tensor_pair_sends_activations_over_tensor_and_gradients_over_data():
    """512 rows on two replicas: y[256, 256] is added up over tensor once forward; dx needs none, x is the batch."""
    bill = bill_of(program_of(task(loss, rules=RULES), batch_size=512, mesh={"data": 2, "tensor": 4}))
    assert bill.by_axes()["tensor",] == 2 * 3 * (256 * 256 * 4) // 4
    assert bill.by_cause()["tensor activation"] == bill.by_axes()["tensor",]
    assert bill.by_axes()["data",] == P // 4 + 4 and bill.by_cause()["gradient reduction"] == P // 4 + 4
