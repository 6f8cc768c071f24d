"""What each reducer sends of the gradient of a byte GPT of width 128 over eight replicas, over the bytes of float32:
from compiled programs.

On CPU; what the TPU compiler makes of it: test_golden_shares.py.
"""

import functools

import jax
import pytest

from tests.support.reduction_alone import compiled_bill, sent_by_formula

SHARES = {"bfloat16": 0.505, "int8": 0.26, "float8": 0.26, "sign": 0.034, "powersgd": 0.05, "topk": 0.08}
"""The largest share that is promised."""


@functools.cache
def sent(name, num=8):
    """Returns the bytes that the compiled reduction sends; of a loop whose length only the gradient knows one round."""
    return sum(
        c.bytes_at_least for c in compiled_bill(name, jax.devices()[:num], {"replica": 1, "data": num}).collectives
    )


@pytest.mark.parametrize("num", [pytest.param(n, marks=() if n == 8 else pytest.mark.slow) for n in (2, 4, 8)])
@pytest.mark.parametrize("name", [*SHARES, "adasum", "ordered", pytest.param("sparse_rows", marks=pytest.mark.slow)])
def test_compiled_reduction_sends_the_formulas_bytes(name, num):
    assert sent(name, num) == pytest.approx(sent_by_formula(name, {"data": num}), rel=5e-3)


@pytest.mark.parametrize("name", SHARES)
def test_it_sends_the_promised_share(name):
    assert 0.85 * SHARES[name] < sent(name) / sent("sum") <= SHARES[name]
