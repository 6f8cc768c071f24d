"""The rendezvous over real loopback sockets, one thread per process: who is missing is said, and in time."""

import socket
import threading
import time

import pytest

from spmdkit import cli
from spmdkit.cluster.detection import ClusterSpec
from spmdkit.cluster.rendezvous import MAX_REASON, is_loopback, rendezvous, report_failure
from spmdkit.errors import ConfigError, RendezvousError
from spmdkit.foundation.constants import ERROR_FILE
from tests.support.threads import in_threads


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def call(specs):
    """Runs the rendezvous of each spec in a thread; returns the results or exceptions."""
    found = in_threads(rendezvous, dict(enumerate(specs)))
    return [found[i] for i in range(len(specs))]


@pytest.fixture
def service_after(monkeypatch):
    """Nobody opens JAX's service in these tests, so nobody waits for it."""
    monkeypatch.setattr("spmdkit.cluster.rendezvous._wait_for_service", lambda *args: None)


def test_all_present_continue(service_after):
    address = free_address()
    assert call([ClusterSpec(address, 3, p, None, 10.0) for p in (2, 0, 1)]) == [address] * 3
    socket.create_server(("127.0.0.1", int(address.split(":")[1]))).close()  # the port is free again for JAX


def test_missing_processes_are_named_to_all(service_after):
    address = free_address()
    errors = call([ClusterSpec(address, 5, p, None, 0.5) for p in (0, 1, 3)])
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert "3 connected within 0.5 s; missing: processes 2 and 4" in str(error)


def test_process_0_missing_is_named_with_its_address(service_after):
    address = free_address()
    [error] = call([ClusterSpec(address, 2, 1, None, 0.3)])
    assert isinstance(error, RendezvousError)
    assert f"could not reach process 0 at {address} within 0.3 s (Connection refused); missing: process 0" in str(error)


def test_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        [error] = call([ClusterSpec(f"127.0.0.1:{holder.getsockname()[1]}", 2, 0, None, 1.0)])
    assert isinstance(error, RendezvousError)
    assert "cannot listen" in str(error) and "Address already in use" in str(error)


def test_different_counts_are_a_config_error(service_after):
    address = free_address()
    errors = call([ClusterSpec(address, 2, 0, None, 5.0), ClusterSpec(address, 3, 1, None, 5.0)])
    assert all(isinstance(e, ConfigError) and "SPMDKIT_NUM_PROCESSES=3, process 0 with 2" in str(e) for e in errors)


def test_rank_used_twice_is_a_config_error(service_after):
    address = free_address()
    errors = call([ClusterSpec(address, 3, p, None, 5.0) for p in (0, 1, 1)])
    assert all(
        isinstance(e, ConfigError) and "two processes were started with SPMDKIT_PROCESS_ID=1" in str(e) for e in errors
    )


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_failure_before_joining_is_named_to_all(failed, service_after):
    address = free_address()
    why = "x.yaml: steps is 0. \nmore, password=hunter2" if failed else "password=hunter2 " + "ä" * 5000
    specs = {p: ClusterSpec(address, 3, p, None, 30.0) for p in range(3)}
    joins = lambda spec: report_failure(spec, why) if spec.process_id == failed else rendezvous(spec)
    found = in_threads(joins, specs)
    errors = [found[p] for p in range(3) if p != failed]
    assert found[failed] is None and all(isinstance(error, RendezvousError) for error in errors)
    shown = "x.yaml: steps is 0. " if failed else "password=***"
    assert all(f"process {failed} failed before it joined: {shown}" in str(error) for error in errors)
    assert all(str(error).count("ä") < MAX_REASON for error in errors)
    assert all("more" not in str(error) and "hunter2" not in str(error) for error in errors)


def test_failure_report_ends_without_listeners(monkeypatch):
    monkeypatch.setattr("spmdkit.cluster.rendezvous.FAILURE_REPORT_S", 0.2)
    for process in (0, 1):
        assert report_failure(ClusterSpec(free_address(), 2, process, None, 30.0), "why") is None


@pytest.mark.parametrize(("begun", "launched", "reports"), [(False, False, 1), (True, False, 0), (False, True, 0)])
def test_train_reports_a_failure_before_joining(begun, launched, reports, monkeypatch):
    env = {"SPMDKIT_COORDINATOR": "localhost:1", "SPMDKIT_NUM_PROCESSES": "2", "SPMDKIT_PROCESS_ID": "1"}
    for name, value in {**env, **({ERROR_FILE: "/dev/null"} if launched else {})}.items():
        monkeypatch.setenv(name, value)
    reported = []
    monkeypatch.setattr("spmdkit.cluster.rendezvous.report_failure", lambda spec, why: reported.append((spec, why)))
    monkeypatch.setattr("spmdkit.cluster.rendezvous._has_begun", begun)
    with pytest.raises(ConfigError), cli._failures_reported():
        raise ConfigError("why")
    assert [(spec.process_id, why) for spec, why in reported] == [(1, "why")] * reports


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"spmdkit": 1}\n', b"\xff" * 5000, b""])
def test_strangers_at_the_port_are_ignored(noise, service_after):
    address = free_address()
    spec = ClusterSpec(address, 2, 0, None, 10.0)
    results = []
    main = threading.Thread(target=lambda: results.append(rendezvous(spec)), daemon=True)
    main.start()
    deadline = time.monotonic() + 10
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", int(address.split(":")[1])), timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
    with stranger:
        stranger.sendall(noise)
        if not noise:
            stranger.shutdown(socket.SHUT_WR)
        results.append(rendezvous(ClusterSpec(address, 2, 1, None, 10.0)))
    main.join(timeout=10)
    assert results == [address, address]


def test_loopback_is_recognized():
    assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "10.0.0.1", "example.org")] == [
        True, True, True, True, False, False,
    ]  # fmt: skip
