"""Connections without acknowledgements."""

import os
import socket
import sys

import pytest

from spmdkit.faults import sockets

ROW = "0: 01004D0A:9C40 02004D0A:1F90 {state} 00000400:00000000 01:00000064 {count} 0 0 {inode} 2 ffff 20 4 30 10 -1"


@pytest.mark.parametrize(
    ("state", "count", "inode", "broken"),
    [
        ("01", "00000003", 71, True),
        ("01", "0000000A", 71, True),
        ("01", "00000002", 71, False),
        ("01", "00000003", 72, False),
        ("02", "00000003", 71, True),
        ("06", "00000003", 71, False),
    ],
)
def test_connection_that_retransmits_in_vain(state, count, inode, broken):
    rows = [ROW.format(state="01", count="00000000", inode=71), ROW.format(state=state, count=count, inode=inode)]
    assert sockets.retransmits(rows, {"socket:[71]", "/dev/null"}) is broken


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_own_connections_are_found(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert not sockets.unanswered()
        inode = os.fstat(client.fileno()).st_ino
        for number, tables in ((inode, True), (inode + 1_000_000, False)):
            table = tmp_path / "tcp"
            table.write_text(f"head\n{ROW.format(state='01', count='00000004', inode=number)}\n")
            monkeypatch.setattr(sockets, "TABLES", (str(table),))
            assert sockets.unanswered() is tables
        monkeypatch.setattr(sockets, "TABLES", (str(tmp_path / "none"),))
        assert not sockets.unanswered()
