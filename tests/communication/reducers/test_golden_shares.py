"""What each reducer sends of the gradient of a byte GPT, as the golden file has it of XLA's CPU compiler and of the
TPU's (`make tpu`)."""

import pytest

from spmdkit.foundation import plugins
from tests.communication.reducers.test_shares import SHARES
from tests.plan import golden_collectives as golden
from tests.support.reduction_alone import gradient


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
