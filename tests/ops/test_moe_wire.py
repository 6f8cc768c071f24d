"""What a mixture of experts sends, read from the compiled program, is what its docstring says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.step import trace_context
from tests.support.forms import slow_except
from tests.support.ops_mesh import GATHERED_TWICE, step, wire

B, T, D, F, E, K, WIDTH = 8, 16, 8, 16, 8, 2, 4
ROWS = ("batch", "norm_sequence", None)
UP, DOWN = ((E, D, F), ("expert", "embed", "mlp")), ((E, F, D), ("expert", "mlp", "embed"))
ARGUMENTS = [((B, T, D), ROWS), ((D, E), ("embed", None)), UP, UP, DOWN]


def mixture(capacity, **options):
    def fn(x_BTD, router, gate, up, down):
        experts = {"gate": gate, "up": up, "down": down}
        y_BTD, load = sk.moe(x_BTD, router, experts, top_k=K, capacity=capacity, **options)
        return y_BTD + load.balance_B[:, None, None].astype(y_BTD.dtype)

    return fn


def formula(capacity, backward, positions=0, **asked):
    """Returns (op, axes) -> bytes: the table of `spmdkit.ops.moe`, line by line."""
    e, f, c, m = (asked.get(a, 1) for a in ("expert", "fsdp", "context", "tensor"))
    N, b = c * m, B // (e * f)
    C_n = math.ceil(math.ceil(capacity * K * T / E) / c) if capacity else 0
    token, choice, part = b * T * D * WIDTH, b * T * 4 * K, (N - 1) / N
    sequence, tensor = tuple(a for a in ("context", "tensor") if asked.get(a, 1) > 1), ("tensor",)
    weights, router = 3 * E * D * F * WIDTH / (e * m * f), D * E * WIDTH / f
    sent = {}

    def add(op, axes, *amounts):
        sent[op, *axes] = sent.get((op, *axes), 0) + sum(amounts)

    if capacity:
        slots = (e - 1) / e * b * E * C_n
        add("all_gather", sequence, part * (token + 2 * choice + 4 * positions))
        add("all_to_all", ("expert",), slots * (D * WIDTH + 4))
        if not backward:
            add("all_to_all", ("expert",), slots * D * WIDTH)
            add("reduce_scatter", sequence, part * token)
        else:
            add("all_gather", sequence, part * token)
            add("all_to_all", ("expert",), slots * (2 * D * WIDTH + 4))
            add("reduce_scatter", sequence, part * (token + choice))
    else:
        for axes, others, shard in ((tensor, m - 1, 1 / N), (("expert",), e - 1, m / N)):
            add("all_gather", axes, others * shard * (token + 2 * choice + backward * token))
            add("reduce_scatter", axes, others * shard * (token + backward * choice))
    add("all_reduce", sequence, 2 * part * b * 4 * (2 * E + 2))
    add("all_gather", ("fsdp",), (f - 1) * (weights + router) * (2 if backward and GATHERED_TWICE else 1))
    if backward:
        add("reduce_scatter", ("fsdp",), (f - 1) * (weights + router))
        add("all_reduce", ("context",), 2 * (c - 1) / c * weights)
        add("all_reduce", ("expert", *sequence), 2 * (e * N - 1) / (e * N) * router)
        add("all_reduce", sequence, 2 * part * b * 4)  # of this test's own: the balance is added to every token
    return {name: round(num) for name, num in sent.items() if num}


CASES = [
    ({"fsdp": 2, "expert": 2, "context": 2}, 1.0),
    ({"expert": 2, "tensor": 2}, None),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, None),
    ({"fsdp": 2, "expert": 2, "context": 2}, None),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, 1.0),
    ({"expert": 4, "context": 2}, 1.0),
    ({"expert": 2, "context": 2, "tensor": 2}, 1.0),
    ({"expert": 2, "context": 2, "tensor": 2}, None),
    ({"fsdp": 4, "expert": 2}, None),
]


@pytest.mark.parametrize("asked, capacity", slow_except(CASES[:1], CASES), ids=str)
def test_communication_matches_the_formula(asked, capacity):
    for backward in (False, True):
        found = wire(mixture(capacity), ROWS, *ARGUMENTS, backward=backward, **asked)
        assert found == formula(capacity, backward, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [1, B])
def test_positions_cost_four_bytes_each(examples):
    asked = CASES[0][0]
    positions = np.arange(T)[::-1].copy() if examples == 1 else np.tile(np.arange(T), (B, 1))
    found = wire(mixture(1.0, positions=positions), ROWS, *ARGUMENTS, **asked)
    assert found == formula(1.0, False, positions=T if examples == 1 else B // 4 * T, **asked)


@pytest.mark.parametrize("platform", ["tpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_accelerator_uses_ragged_exchange(platform, monkeypatch):
    """Lowered, not run: this machine has neither. Numbers are compared in test_moe.py, with a stand-in for the
    collective."""
    monkeypatch.setattr(trace_context.Context, "platform", platform)
    record = step(expert=8)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape, _ in ARGUMENTS]
    loss = lambda *args: mixture(None)(*args).astype(jnp.float32).sum()
    with trace_context.tracing(record):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*shapes)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    # Tokens and weights there again, cotangents of all three passes; the way back again is dead, and XLA leaves it out.
    assert text.count("ragged_all_to_all(") == 2 + 3 + 1
    assert ("ragged_dot" in text) == (platform == "tpu")
