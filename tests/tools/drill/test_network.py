"""Network faults between two and three simulated hosts: the run exits or recovers within its timeouts, and never with a
wrong result. As root: each process runs in its own network namespace."""

import socket
import threading
import time

import pytest

from spmdkit.errors import ConfigError
from spmdkit.faults.injection.fault import NETWORK, TEMPORARY, parse
from spmdkit.tools.drill import network
from tests.tools.drill.test_kills import figures

reason = network.missing_support()
hosts = pytest.mark.skipif(bool(reason), reason=reason)


def test_switch_rules_apply_to_the_named_hosts():
    assert network.rules_of("partition-send", 1, 2) == [(1, 0, 1.0, 0.0, 0.0), (1, 2, 1.0, 0.0, 0.0)]
    both = [(2, 0, 1.0, 0.0, 0.0), (0, 2, 1.0, 0.0, 0.0)]
    assert network.rules_of("partition-peer", 2, 3) == both, "both reach the launcher, port 3"
    assert {(a, b) for a, b, *_ in network.rules_of("partition", 0, 2)} == {(0, 1), (1, 0), (0, 2), (2, 0)}
    assert {rule[2:] for rule in network.rules_of("delay", 0, 2)} == {(0.0, 0.05, 0.0)}
    assert {rule[2:] for rule in network.rules_of("loss", 0, 2)} == {(0.02, 0.0, 0.0)}
    assert {rule[2:] for rule in network.rules_of("rate", 0, 2)} == {(0.0, 0.0, 1e6)}


def test_unsupported_machine_is_refused_with_an_alternative(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError) as error, network.network_for([parse("partition:1@20", 2)], 2):
        pass
    assert "--fault partition:1@20: network namespaces need root" in str(error.value)
    assert "--fault stop:1@20" in str(error.value)
    with network.network_for([parse("kill:1@20", 2)], 2) as nothing:
        assert nothing is None


def seconds_of_a_stream(hosts_of_drill, size):
    """Returns the seconds that `size` bytes take by TCP from host 0 to host 1."""
    with hosts_of_drill.host(1):
        server = socket.create_server(("10.77.0.2", 5001))
    with hosts_of_drill.host(0):
        sender = socket.socket()
    sender.connect(("10.77.0.2", 5001))
    receiver, _ = server.accept()
    with server, sender, receiver:
        begin = time.monotonic()
        threading.Thread(target=sender.sendall, args=(b"x" * size,), daemon=True).start()
        while size:
            size -= len(receiver.recv(65536))
        return time.monotonic() - begin


@hosts
def test_simulated_network_faults_leave_the_machine_untouched():
    before = socket.if_nameindex()
    faults = [parse("partition:0@9", 2)]
    with network.network_for(faults, 2) as hosts_of_drill:
        assert [name for _, name in socket.if_nameindex() if name not in ("lo", "tap0")] == [], "a new namespace"
        sockets = []
        for process in range(2):
            with hosts_of_drill.host(process):
                sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                sockets[-1].bind((f"10.77.0.{process + 1}", 5000))
        here, there = sockets

        def arrives(sender, receiver, to, within_s):
            receiver.settimeout(within_s)
            begin = time.monotonic()
            sender.sendto(b"x", (to, 5000))
            try:
                receiver.recv(1)
            except TimeoutError:
                return None
            return time.monotonic() - begin

        forth = lambda within_s=5.0: arrives(here, there, "10.77.0.2", within_s)
        back = lambda within_s=5.0: arrives(there, here, "10.77.0.1", within_s)
        assert forth() is not None and back() is not None
        unlimited_s = seconds_of_a_stream(hosts_of_drill, 300_000)
        hosts_of_drill.inject("partition-send", 0)
        time.sleep(0.2)
        assert forth(0.5) is None and back() is not None
        hosts_of_drill.inject("delay", 0)
        time.sleep(0.2)
        assert forth() >= 0.05 and back() >= 0.05
        hosts_of_drill.inject("rate", 0)
        time.sleep(0.2)
        assert seconds_of_a_stream(hosts_of_drill, 300_000) > max(0.1, 2 * unlimited_s), (
            "64 KiB in a burst, the rest at 1 MB/s"
        )
        hosts_of_drill.inject("partition", 1)
        time.sleep(0.2)
        assert forth(0.3) is None and back(0.3) is None
        hosts_of_drill.restore()
        time.sleep(0.2)
        assert forth() is not None and back() is not None
        here.close()
        there.close()
    assert socket.if_nameindex() == before


@hosts
@pytest.mark.slow
@pytest.mark.processes
def test_network_faults_never_change_results(drills):
    orders = ("delay:1@11", "loss:0@31", "rate:2@41", "partition:1@260", "partition-send:2@275", "partition-peer:1@290")
    options = [word for order in orders for word in ("--fault", order)]
    limits = ["watchdog.heartbeat_timeout_s=5", "watchdog.step_timeout_s=6"]
    size = ("-n", "3", "devices=cpu:3", "batch_size=12", "steps=350", "task_args.pause_s=0.04")
    code, output = drills.run(*size, *options, *limits, timeout_s=280)
    assert code == 0, output
    result = drills.result()
    print(figures(result))
    for fault in result["faults"]:
        print(fault["kind"], fault["detection_s"], fault["detected_by"], fault["recovery_s"])
    assert {fault["kind"] for fault in result["faults"]} == set(NETWORK)
    assert result["same_parameters"] and result["same_metrics"]
    assert result["attempts"] == 4, "temporary faults cost no restart"
    for fault in result["faults"]:
        if fault["kind"] not in TEMPORARY:
            assert 2 < fault["detection_s"] < 3 * 6 + result["undisturbed_start_s"], fault
