"""Reading a saved text of XLA's GPU compiler: `GPT` of save_texts.py, data 2 x tensor 4 on 8 H100."""

import gzip
import math
from pathlib import Path

import pytest

from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.costs import Costs
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.kernels import target_of
from tests.plan.save_texts import GPT

SIZES = {"data": 2, "tensor": 4}
ARGS = GPT["task_args"]
ROWS, TOKENS = GPT["batch_size"] // 2, GPT["batch_size"] // 2 * ARGS["context"]  # of a replica
LAYERS, WIDTH, HIDDEN, HEADS = (ARGS[name] for name in ("layers", "width", "hidden", "heads"))


@pytest.fixture(scope="module")
def module():
    return parse(gzip.decompress(Path(__file__).with_name("texts").joinpath("gpt_h100.txt.gz").read_bytes()).decode())


def costs_of(module, target):
    """Returns (calls, FLOPs, bytes) of one step of the custom calls to a target."""
    costs = Costs(module)
    visits = [v for v in loops.walk(module) if v.instruction.opcode == "custom-call"]
    visits = [v for v in visits if target_of(v.instruction) == target]
    flops = sum(v.runs * sum(costs.flops(v.instruction).values()) for v in visits)
    return sum(v.runs for v in visits), flops, sum(v.runs * costs.bytes(v.instruction) for v in visits)


def test_attention_of_cudnn_costs_its_shapes(module):
    product = 2 * ROWS * HEADS // 4 * ARGS["context"] ** 2 * (WIDTH // HEADS) / 2  # causal: half of it
    array, row = TOKENS * WIDTH // 4 * 2, ROWS * HEADS // 4 * ARGS["context"] * 4  # q, k, v, out; the sums
    forward = costs_of(module, "__cudnn$fmhaSoftmax")
    assert forward[:2] == (LAYERS, LAYERS * 2 * product)
    assert forward[2] == pytest.approx(LAYERS * (4 * array + row), rel=0.01)
    backward = costs_of(module, "__cudnn$fmhaSoftmaxBackward")
    assert backward[:2] == (LAYERS, LAYERS * 5 * product)
    assert backward[2] >= LAYERS * (8 * array + row)


def test_flops_of_a_device_are_those_of_the_model(module):
    matrices = LAYERS * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN) + WIDTH * ARGS["vocab"]
    expected = (
        3 * 2 * TOKENS * matrices / 4
        + costs_of(module, "__cudnn$fmhaSoftmax")[1]
        + costs_of(module, "__cudnn$fmhaSoftmaxBackward")[1]
    )
    costs = Costs(module)
    unfused = {i.name for i in module.unfused()}
    found = sum(
        v.runs * sum(costs.flops(v.instruction).values()) for v in loops.walk(module) if v.instruction.name in unfused
    )
    assert found == pytest.approx(expected, rel=0.02)


def test_merged_sums_of_gradients_keep_their_cause(module):
    bill = read_bill(module, SIZES)
    assert set(bill.by("cause")) <= {"tensor activation", "gradient reduction", "optimizer", "metrics"}
    (merged,) = [c for c in bill.collectives if c.op == "all_reduce" and c.axes == ("data",)]
    params = LAYERS * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN) // 4 + 2 * WIDTH * ARGS["vocab"] // 4
    assert merged.cause == "gradient reduction"
    assert params * 4 <= merged.size <= 1.01 * params * 4
    assert math.prod(merged.shapes[0].dims) * 4 == merged.size
