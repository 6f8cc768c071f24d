"""What stands between a client and gRPC's server: frames pass unchanged, and a PING of the server is answered whether
the client lives or not."""

import asyncio
import socket
import threading

import pytest

from spmdkit.cluster.service.grpc_relay import Relay

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING, DATA, SETTINGS = 6, 0, 4


def frame(kind, payload, flags=0, stream=0):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@pytest.fixture
def pair():
    """A client that is connected, and the server's end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        relay, loop = Relay(server.getsockname()), asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        asyncio.run_coroutine_threadsafe(asyncio.start_server(relay.connect, sock=listener), loop).result(5)
        with socket.create_connection(listener.getsockname(), timeout=5) as client, server.accept()[0] as end:
            end.settimeout(5)
            yield relay, client, end
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def received(connection, count):
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


@pytest.mark.parametrize("part", [1, 7, 10_000_000], ids=["byte by byte", "in parts", "at once"])
def test_server_pings_are_answered_for_the_client(pair, part):
    _, client, end = pair
    before, after = frame(SETTINGS, b"abcdef"), frame(DATA, b"x" * 50, stream=3)
    acknowledged = frame(PING, b"abcdefgh", flags=1)
    sent = before + frame(PING, b"12345678") + after + acknowledged
    for at in range(0, len(sent), part):
        end.sendall(sent[at : at + part])
    assert received(end, 17) == frame(PING, b"12345678", flags=1)
    end.close()
    assert b"".join(iter(lambda: client.recv(1 << 16), b"")) == before + after + acknowledged


def test_client_frames_pass_unchanged(pair):
    relay, client, end = pair
    sent = PREFACE + frame(SETTINGS, b"") + frame(PING, b"87654321") + frame(DATA, b"y" * 500_000, stream=1)
    client.sendall(sent)
    assert received(end, len(sent)) == sent
    assert relay.num_connected == 1
    client.close()
    assert end.recv(1) == b"", "the end of one side is the end of the other"


def test_replies_are_sent_without_delay():
    async def has_no_delay(service, listener):
        clients = []

        async def connect(reader, writer):
            clients.append(writer)
            await Relay(service.getsockname()).connect(reader, writer)

        async with await asyncio.start_server(connect, sock=listener):
            _, client = await asyncio.open_connection(*listener.getsockname())
            end, _ = await asyncio.to_thread(service.accept)  # the relay has accepted the client
            option = clients[0].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            end.close()
            client.close()
            return option

    with socket.create_server(("127.0.0.1", 0)) as service, socket.create_server(("127.0.0.1", 0)) as listener:
        assert asyncio.run(has_no_delay(service, listener))
