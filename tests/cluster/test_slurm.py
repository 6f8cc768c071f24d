"""Slurm's lists of hosts."""

import pytest

from spmdkit.cluster.environments.slurm import first_host


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("vm", "vm"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("a-b[3-9].c-d,x", "a-b3.c-d"),
        ("rack[1-2]node[3,5]", "rack1node3"),
        ("10.0.0.7,10.0.0.8", "10.0.0.7"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first
