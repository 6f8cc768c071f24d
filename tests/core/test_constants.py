"""The tables of shared names agree with themselves and with what reads them."""

import pytest

from spmdkit.cluster import join
from spmdkit.cluster.spec import ClusterSpec
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import constants
from spmdkit.mesh import mesh
from spmdkit.plan.machine.target import parse_target


def test_every_axis_has_one_kind():
    assert {*constants.REPLICA_AXES, *constants.MODEL_AXES} == set(constants.AXES)
    assert not set(constants.REPLICA_AXES) & set(constants.MODEL_AXES)
    assert set(constants.BATCH_AXES) <= set(constants.AXES)
    assert (mesh.AXES, mesh.BATCH_AXES) == (constants.AXES, constants.BATCH_AXES)


@pytest.mark.parametrize(
    ("text", "number"), [("cpu:1", 1), ("cpu:08", 8), (f"cpu:{constants.MAX_FAKE_DEVICES}", constants.MAX_FAKE_DEVICES)]
)
def test_config_and_target_read_fake_devices_alike(text, number):
    assert constants.fake_devices(text) == number
    assert Config(task="a.py:t", devices=text).devices == f"cpu:{number}"
    assert parse_target(text).num_devices == number


@pytest.mark.parametrize("text", ["cpu:0", "cpu:4097", "cpu:-1", "cpu:²", "cpu:1:2", "gpu:2"])
def test_config_and_join_reject_the_same_devices(text):
    assert constants.fake_devices(text) is None
    with pytest.raises(ConfigError):
        Config(task="a.py:t", devices=text)
    with pytest.raises(ConfigError, match="auto, cpu:N"):
        join(ClusterSpec(), text)
