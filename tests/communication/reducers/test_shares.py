"""What each reducer sends of the gradient of a byte GPT of width 128 over eight replicas, over the bytes of float32:
by its formula, in a compiled program, and in the golden file of the CPU's and the TPU's compiler (`make tpu`)."""

import jax
import pytest

from spmdkit.foundation import plugins
from tests.plan import golden_collectives as golden
from tests.support.forms import slow_except
from tests.support.reduction_alone import compiled_bill, gradient, sent_by_formula

SHARES = {"bfloat16": 0.505, "int8": 0.26, "float8": 0.26, "sign": 0.034, "powersgd": 0.05, "topk": 0.08}
"""The largest share that is promised."""


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_except({"int8"}, [*SHARES, "adasum", "ordered", "sparse_rows"]))
def test_compiled_reduction_sends_the_formulas_bytes(name, num):
    """Of a loop whose length only the gradient knows one round."""
    bill = compiled_bill(name, jax.devices()[:num], {"replica": 1, "data": num})
    sent = sum(c.bytes_at_least for c in bill.collectives)
    assert sent == pytest.approx(sent_by_formula(name, {"data": num}), rel=5e-3)


@pytest.mark.parametrize("name", SHARES)
def test_it_sends_the_promised_share(name):
    share = sent_by_formula(name, {"data": 8}) / sent_by_formula("sum", {"data": 8})
    assert 0.85 * SHARES[name] < share <= SHARES[name]


@pytest.mark.parametrize("target", golden.REDUCER_TARGETS)
@pytest.mark.parametrize("name", SHARES)
def test_golden_file_has_documented_bytes_on_all_platforms(name, target):
    share = golden.share(golden.read()["targets"], target, name)
    assert 0.85 * SHARES[name] < share <= SHARES[name]


@pytest.mark.parametrize("target", golden.REDUCER_TARGETS)
def test_hierarchical_sends_a_fourth_of_int8_on_tpus(target):
    rows = golden.read()["targets"][target][golden.REDUCER + "hierarchical"]["collectives"]
    values = sum(x.size for x in gradient().values())
    over_replica = sum(row["bytes"] for row in rows if row["axes"] == "replica")
    assert over_replica == pytest.approx(plugins.make("reducers", "int8").wire(values // 4, 2), rel=2e-3)
