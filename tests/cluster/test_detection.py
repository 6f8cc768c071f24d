"""Environment variables become a ClusterSpec, and an error names the change that repairs it."""

import pytest

from spmdkit.cluster import ClusterSpec, detect_cluster
from spmdkit.errors import ConfigError

MANY = {"SPMDKIT_COORDINATOR": "10.0.0.1:8476", "SPMDKIT_NUM_PROCESSES": "4", "SPMDKIT_PROCESS_ID": "3"}


def test_variables_of_the_launcher_are_read():
    spec = detect_cluster({**MANY, "SPMDKIT_DEVICES_PER_PROCESS": "2", "SPMDKIT_RENDEZVOUS_TIMEOUT_S": "7.5"})
    assert spec == ClusterSpec("10.0.0.1:8476", 4, 3, 2, 7.5)
    assert detect_cluster({}) == detect_cluster({"SPMDKIT_ERROR_FILE": "/tmp/e.json"}) == ClusterSpec(None, 1, 0, None)
    assert detect_cluster({"SPMDKIT_COORDINATOR": "10.0.0.1:1", "SPMDKIT_NUM_PROCESSES": "1"}).coordinator is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"SPMDKIT_NUM_PROCESSES": "two"}, "SPMDKIT_NUM_PROCESSES='two': expected a whole number of at least 1"),
        ({"SPMDKIT_NUM_PROCESSES": "0"}, "at least 1"),
        ({"SPMDKIT_PROCESS_ID": "-1"}, "at least 0"),
        ({"SPMDKIT_PROCESS_ID": "4"}, "the numbers run from 0 to 3"),
        ({"SPMDKIT_PROCESS_ID": ""}, "SPMDKIT_PROCESS_ID is not set"),
        ({"SPMDKIT_COORDINATOR": ""}, "SPMDKIT_COORDINATOR is not set"),
        ({"SPMDKIT_COORDINATOR": "10.0.0.1"}, "host:port"),
        ({"SPMDKIT_COORDINATOR": "host:0"}, "port from 1 to 65535"),
        ({"SPMDKIT_COORDINATOR": "host:65536"}, "port from 1 to 65535"),
        ({"SPMDKIT_DEVICES_PER_PROCESS": "1.5"}, "at least 1"),
        ({"SPMDKIT_RENDEZVOUS_TIMEOUT_S": "soon"}, "expected seconds"),
        ({"SPMDKIT_RENDEZVOUS_TIMEOUT_S": "nan"}, "expected seconds"),
    ],
)
def test_bad_variable_is_named_with_its_repair(change, expected):
    with pytest.raises(ConfigError, match="SPMDKIT_") as caught:
        detect_cluster({**MANY, **change})
    assert expected in str(caught.value)
    assert caught.value.exit_code == 78
