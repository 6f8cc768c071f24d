"""What stands between a client and gRPC's server: frames pass unchanged, and a PING of the server is answered whether
the client lives or not."""

import socket

import pytest

from spmdkit.cluster.service.grpc_relay import Relay

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING, DATA, SETTINGS = 6, 0, 4


def frame(kind, payload, flags=0, stream=0):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@pytest.fixture
def pair():
    """A client that is connected, the server's end of its connection, and what lets everything pass."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener, server.getsockname())
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            relay.turn(5)
            end, _ = server.accept()
            with end:
                for each in (client, end):
                    each.settimeout(0.005)
                yield relay, client, end
        for _ in range(5):
            relay.turn(0.01)
        relay._selector.close()


def received(relay, connection):
    """Returns what comes until nothing more does."""
    data, silent = b"", 0
    while silent < 20:
        relay.turn(0)
        try:
            data, silent = data + connection.recv(1 << 20), 0
        except TimeoutError:
            silent += 1
    return data


@pytest.mark.parametrize("part", [1, 7, 10_000_000], ids=["byte by byte", "in parts", "at once"])
def test_a_ping_of_the_server_is_answered_for_the_client_and_all_else_passes(pair, part):
    relay, client, end = pair
    before, after = frame(SETTINGS, b"abcdef"), frame(DATA, b"x" * 50, stream=3)
    said = before + frame(PING, b"12345678") + after + frame(PING, b"abcdefgh", flags=1)
    for at in range(0, len(said), part):
        end.sendall(said[at : at + part])
        relay.turn(0.01)
    assert received(relay, client) == before + after + frame(PING, b"abcdefgh", flags=1), "an answer is for the client"
    assert received(relay, end) == frame(PING, b"12345678", flags=1)


def test_what_a_client_says_passes_unchanged_also_its_pings_and_what_is_large(pair):
    relay, client, end = pair
    said = PREFACE + frame(SETTINGS, b"") + frame(PING, b"87654321") + frame(DATA, b"y" * 500_000, stream=1)
    client.settimeout(5)
    client.sendall(said)
    assert received(relay, end) == said


def test_the_end_of_one_side_is_the_end_of_the_other(pair):
    relay, client, end = pair
    assert relay.num_connected == 1
    client.close()
    for _ in range(3):
        relay.turn(0.05)
    assert relay.num_connected == 0
    assert end.recv(1) == b""
