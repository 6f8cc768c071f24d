"""The bill says which strategy asked for a collective, and what is sent along each axis."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.plan.attribution import CAUSES
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.testing import bill_of
from tests.plan.bad_programs import error, task
from tests.support.core_runs import program_of

P = 2 * 256 * 512 * 4
RULES = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]


def loss(params, batch, key):
    x = sk.shard(batch["x"], "batch", None)
    h = sk.shard(x @ params["up"], "batch", "mlp") * 2
    return error(sk.shard(h @ params["down"], "batch", None), batch)


SUMS = 2 * 7 * 4 // 8
"""The sum of the losses, one float32; the count is known without a sum. Part of the gradient's all_reduce where there
is one."""

CASES = {
    "hierarchical": ({"mesh": {"replica": 2, "data": 4}}, {"gradient reduction": 2 * 7 * P // 8 + SUMS}),
    "zero 1": (
        {"mesh": {"fsdp": 8}, "layout": {"zero": 1}},
        {"gradient reduction": 2 * 7 * P // 8 + SUMS, "update gather": 7 * P // 8},
    ),
    "zero 2": (
        {"mesh": {"fsdp": 8}, "layout": {"zero": 2}},
        {"gradient scatter": 7 * P // 8, "metrics": SUMS, "update gather": 7 * P // 8},
    ),
    # 512 rows on two replicas: y[256, 256] is added up over tensor once forward; dx needs none, x is the batch.
    "tensor": (
        {"mesh": {"data": 2, "tensor": 4}},
        {"tensor activation": 2 * 3 * (256 * 256 * 4) // 4, "gradient reduction": P // 4 + 4},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_a_strategy_and_their_causes(case):
    settings, expected = CASES[case]
    bill = bill_of(program_of(task(loss, rules=RULES), batch_size=512, **settings))
    assert bill.by("cause") == expected
    assert bill.bytes == sum(expected.values()) == sum(row.bytes for row in bill.rows)
    assert {c.cause for c in bill.collectives} <= set(CAUSES)
    if case == "tensor":
        assert bill.by("axes")["tensor",] == expected["tensor activation"]


TEXT = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY e {{
  p = f32[8,16]{{1,0}} parameter(0)
  q = f32[8,16]{{1,0}} add(p, p)
  ROOT a = f32[8,16]{{1,0}} {op}(q), replica_groups={groups}, dimensions={{0}}, metadata={{op_name="{name}"}}
}}
"""
SIZES = {"context": 2, "expert": 2, "pipeline": 2}
OVER = {
    "context": "{{0,4},{1,5},{2,6},{3,7}}",
    "expert": "{{0,2},{1,3},{4,6},{5,7}}",
    "expert and pipeline": "{{0,1,2,3},{4,5,6,7}}",
}


@pytest.mark.parametrize(
    ("over", "name", "cause"),
    [
        ("context", "jit(train_step)/jvp()/all_to_all", "context exchange"),
        ("context", "jit(train_step)/vmap(jvp(spmdkit/ring))/shard_map/all_to_all", "context ring"),
        ("context", "jit(train_step)/transpose(jvp(spmdkit/all_to_all))/all_to_all", "context exchange"),
        ("context", "jit(train_step)/spmdkit/reduce/all_to_all", "gradient reduction"),
        ("context", "jit(train_step)/(jvp(spmdkit/ring)/all_to_all:transpose(jvp())/mul)", "context ring"),
        ("expert", "jit(train_step)/jvp(spmdkit/ring)/all_to_all", "expert dispatch"),
        ("expert and pipeline", "jit(train_step)/jvp(spmdkit/pipeline)/while/body/all_to_all", "pipeline transfer"),
        ("expert and pipeline", "jit(train_step)/jvp(spmdkit/pipeline)/while/body/spmdkit/moe/x", "expert dispatch"),
    ],
)
def test_cause_by_the_innermost_scope_about_an_axis(over, name, cause):
    """Without any file or function in the program's text."""
    text = TEXT.format(op="all-to-all", groups=OVER[over], name=name)
    (found,) = read_bill(parse(text), SIZES).collectives
    assert found.cause == cause


def test_ops_in_their_scope_forward_and_backward():
    """What leaves a device in the loss of a model with a vocabulary, a pair of products and a ring, bill and jaxpr
    alike."""

    def loss(params, batch, key):
        tokens = sk.context_order(batch["tokens"])
        x = sk.embed(tokens, params["table"])
        heads = lambda x: sk.attention(x, x, x, causal=True)
        x = x + sk.column_row_parallel(x, [params["q"]], heads, params["out"], hidden="heads")
        return sk.mean(sk.cross_entropy(x, params["table"].T, tokens).mean(-1))

    shapes = {"table": (64, 16), "q": (16, 4, 8), "out": (4, 8, 16)}
    model = sk.Task(
        lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()},
        loss,
        optax.sgd(0.1),
        train_data={"tokens": np.zeros((16, 32), np.int32)},
        rules=[("table", ["vocab", "embed"]), ("q", ["embed", "heads", None]), ("out", ["heads", None, "embed"])],
    )
    bill = bill_of(program_of(model, batch_size=2, mesh={"context": 2, "tensor": 2}))
    of_scope = {"spmdkit/ring": "context", "spmdkit/tensor": "tensor", "spmdkit/vocab": "tensor"}
    for scope, axis in of_scope.items():
        names = [c.op_name for c in bill.collectives if axis in c.axes and scope in c.op_name]
        assert {"transpose(" in name for name in names} == {False, True}, (scope, names)
    assert bill.by("cause").keys() == {"context ring", "tensor activation", "gradient reduction"}
