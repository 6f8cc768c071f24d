"""A process's connection to the coordination service: what passes, and what happens when either side ends."""

import socket
import threading

import pytest

from spmdkit.cluster.service import ServiceConnection, bypass_proxies


@pytest.fixture
def connected():
    """A service, the connection, a client, and the service's side of the client's connection."""
    server = socket.create_server(("127.0.0.1", 0))
    connection = ServiceConnection(f"127.0.0.1:{server.getsockname()[1]}")
    host, port = connection.address.split(":")
    client = socket.create_connection((host, int(port)), 5)
    peer, _ = server.accept()
    peer.settimeout(5)
    yield connection, client, peer
    for end in (client, peer, server):
        end.close()
    connection.close()


def test_bytes_pass_in_both_directions(connected):
    _, client, peer = connected
    for source, target in ((client, peer), (peer, client)):
        data = b"x" * 300_000
        threading.Thread(target=source.sendall, args=(data,)).start()
        received = b""
        while len(received) < len(data):
            received += target.recv(1 << 20)
        assert received == data


def test_client_stays_connected_when_the_service_ends(connected):
    connection, client, peer = connected
    lost = threading.Event()
    connection.on_lost = lost.set
    peer.sendall(b"up")
    assert client.recv(10) == b"up"
    peer.close()
    assert lost.wait(5)
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(1)


def test_client_is_disconnected_without_a_handler(connected):
    _, client, peer = connected
    peer.sendall(b"up")
    assert client.recv(10) == b"up"
    peer.close()
    assert client.recv(1) == b""


def test_client_that_leaves_first_loses_nothing(connected):
    connection, client, peer = connected
    lost = threading.Event()
    connection.on_lost = lost.set
    peer.sendall(b"up")
    client.recv(10)
    client.close()
    assert peer.recv(1) == b""
    peer.close()
    assert not lost.wait(0.3)


def test_service_that_never_replied_is_not_lost(connected):
    connection, client, peer = connected
    lost = threading.Event()
    connection.on_lost = lost.set
    peer.close()
    assert client.recv(1) == b"" and not lost.is_set()


def test_client_of_a_service_that_is_not_up_can_retry():
    lost = threading.Event()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        other = ServiceConnection(f"127.0.0.1:{unused.getsockname()[1]}")
        other.on_lost = lost.set
        host, port = other.address.split(":")
        for _ in range(2):
            with socket.create_connection((host, int(port)), 5) as client:
                assert client.recv(1) == b""
        other.close()
    assert not lost.is_set()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "p"}, "127.0.0.1,localhost"),
        ({"grpc_proxy": "p", "NO_PROXY": "10.0.0.1"}, "127.0.0.1,localhost,10.0.0.1"),
    ],
)
def test_loopback_interface_bypasses_proxies(env, expected):
    bypass_proxies(env)
    assert env.get("no_proxy") == expected
    bypass_proxies(env)
    assert (env.get("no_proxy") or "").count("10.0.0.1") <= 1
