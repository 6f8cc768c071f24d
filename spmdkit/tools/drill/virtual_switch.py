"""A switch in user space: forwards frames between the TAP devices of a drill's hosts, and drops, delays or throttles
them by rules. network.py runs it by its path.

    python -I -S virtual_switch.py DESCRIPTOR ...

Each line on standard input is a JSON list of rules `[from, to, lost, delay_s, bytes_per_s]` that replaces the previous
list: ports are numbers of descriptors, `lost` is a fraction of the frames, and `bytes_per_s` limits the rate by a token
bucket (0: no limit). A frame that would wait longer than MAX_QUEUED_S is dropped. Measured: 3.4 Gbit/s between two
hosts (2026-11-22).
"""

from __future__ import annotations

import heapq
import json
import os
import random
import selectors
import sys
import time

MAX_FRAMES_PER_READ, FRAME_BYTES, IDLE_S = 64, 65535, 0.5
BURST_BYTES, MAX_QUEUED_S = 65536, 0.2
"""Capacity of a bucket, and the maximum time that a frame waits for tokens."""

Rules = dict[tuple[int, int], tuple[float, float, float]]


class Switch:
    """Frames between `ports`, open descriptors of TAP devices."""

    def __init__(self, ports: list[int]):
        self._ports, self._rng = ports, random.Random(0)
        self._port_of: dict[bytes, int] = {}  # source address -> port
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._used_up: dict[tuple[int, int], float] = {}  # when the last token of a direction is used up
        self.rules: Rules = {}

    def receive(self, port: int) -> None:
        """Reads the frames of a port and queues them."""
        for _ in range(MAX_FRAMES_PER_READ):
            try:
                frame = os.read(self._ports[port], FRAME_BYTES)
            except BlockingIOError:
                return
            self._port_of[frame[6:12]] = port
            known = self._port_of.get(frame[:6])
            for to in [known] if known is not None else [i for i in range(len(self._ports)) if i != port]:
                lost, delay_s, rate = self.rules.get((port, to), (0.0, 0.0, 0.0))
                begin = now = time.monotonic()
                if self._rng.random() < lost:
                    continue
                if rate:
                    begin = max(self._used_up.get((port, to), 0.0), now - BURST_BYTES / rate) + len(frame) / rate
                    if begin - now > MAX_QUEUED_S:
                        continue
                    self._used_up[port, to] = begin
                self._count += 1
                heapq.heappush(self._waiting, (max(begin, now) + delay_s, self._count, to, frame))

    def send_due(self) -> float:
        """Sends the frames that are due; returns the seconds until the next frame is due."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(self._waiting)
            try:
                os.write(self._ports[to], frame)
            except OSError:
                continue  # the queue is full or the device is down: the frame is lost
        return min(IDLE_S, max(0.0, self._waiting[0][0] - time.monotonic())) if self._waiting else IDLE_S


def main(ports: list[int]) -> None:
    switch, selector, text = Switch(ports), selectors.DefaultSelector(), b""
    for number, port in enumerate(ports):
        os.set_blocking(port, False)
        selector.register(port, selectors.EVENT_READ, number)
    selector.register(0, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select(switch.send_due()):
            if key.data is not None:
                switch.receive(key.data)
                continue
            more = os.read(0, FRAME_BYTES)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                switch.rules = {(a, b): (lost, delay_s, rate) for a, b, lost, delay_s, rate in json.loads(line)}


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
