"""One process and its devices. The tests' JAX already runs with eight CPU devices."""

import os
import socket

import jax
import pytest

import spmdkit as sk
from spmdkit import compat
from spmdkit.cluster import ClusterSpec, join, rendezvous
from spmdkit.cluster.join import COLLECTIVE_MARGIN_S, exposure_warning
from spmdkit.errors import ConfigError


def test_single_process_takes_the_first_devices():
    cluster = join(ClusterSpec(), "cpu:4")
    assert cluster.devices == jax.devices()[:4]
    assert (cluster.process_index, cluster.num_processes, cluster.is_main) == (0, 1, True)
    assert join(ClusterSpec()).devices == jax.devices()
    assert join(ClusterSpec(), [3, 1]).devices == [jax.devices()[3], jax.devices()[1]]
    assert len(join(ClusterSpec(devices_per_process=2), "cpu:8").devices) == 2


@pytest.mark.parametrize(
    ("spec", "devices", "expected"),
    [
        (ClusterSpec(), "cpu:9", "devices: cpu:9 needs 9 in process 0, found 8 cpu"),
        (ClusterSpec(), "cpu:0", "devices is 'cpu:0'"),
        (ClusterSpec(), "gpu:2", "devices is 'gpu:2'"),
        (ClusterSpec(), [8], "devices: [8] names device 8, found 8 cpu device(s) in process 0"),
        (ClusterSpec(), [1, 1], "must be distinct indices"),
        (ClusterSpec(), [-1], "must be distinct indices"),
        (ClusterSpec(), [], "must be distinct indices"),
        (ClusterSpec(devices_per_process=3), "auto", "is 3, found [8]"),
        (ClusterSpec("127.0.0.1:1", 3, 0), "cpu:8", "cpu:8 over 3 processes leaves a remainder of 2"),
        (ClusterSpec("127.0.0.1:1", 2, 0), "cpu:8", "JAX has already created the devices"),
    ],
)
def test_missing_devices_are_rejected(spec, devices, expected):
    assert len(jax.devices()) == 8
    with pytest.raises(ConfigError) as caught:
        join(spec, devices)
    assert expected in str(caught.value)


def test_process_0_warns_of_every_network():
    """The address is none of this machine's: TEST-NET-1 never is."""
    listener, bound = rendezvous._listen(ClusterSpec(f"192.0.2.1:{free_port()}", 2, 0))
    listener.close()
    said = exposure_warning(ClusterSpec("192.0.2.1:1", num_processes=2), bound)
    assert bound.startswith("0.0.0.0:") and len(said) == 1
    for part in (bound, "192.0.2.1:1 is not one of its addresses", "Any host that reaches the port can end the job"):
        assert part in said[0]
    assert exposure_warning(ClusterSpec("192.0.2.1:1", num_processes=2, process_id=1), bound) == ()


def test_coordinator_on_loopback_listens_there():
    for host in ("127.0.0.1", "localhost"):
        address = f"{host}:{free_port()}"
        listener, bound = rendezvous._listen(ClusterSpec(address, 2, 0))
        with listener:
            assert rendezvous.is_loopback(listener.getsockname()[0])
        assert exposure_warning(ClusterSpec(address, num_processes=2), bound) == ()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_collective_timeout_exceeds_the_watchdog(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    compat.set_cpu_collective_timeout(int(sk.Config(task="t.py:t").watchdog.longest_timeout_s) + COLLECTIVE_MARGIN_S)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/x --xla_cpu_collective_timeout_seconds=3660"
    compat.set_cpu_collective_timeout(7)
    assert os.environ["XLA_FLAGS"].endswith("=3660")
