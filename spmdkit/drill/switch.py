"""A switch in user space: carries the frames between the TAP devices of a drill's hosts, and loses or delays them on order. Run by its path, by network.py.

    python -I -S switch.py DESCRIPTOR ...

Each line on standard input is a JSON list of rules `[from, to, lost, delay_s]` that takes the place of the one before: ports are numbers of descriptors, `lost` a part
of the frames, from 0 to 1. Ends with its standard input. Not every kernel has netem, and netem knows no pairs; 3.4 Gbit/s with two hosts (shared/probes, 2026-11-22).
"""

from __future__ import annotations

import heapq
import json
import os
import random
import selectors
import sys
import time

MOST_AT_ONCE, FRAME_BYTES, IDLE_S = 64, 65535, 0.5

Rules = dict[tuple[int, int], tuple[float, float]]


class Switch:
    """Frames between `ports`, open descriptors of TAP devices."""

    def __init__(self, ports: list[int]):
        self._ports, self._rng = ports, random.Random(0)
        self._port_of: dict[bytes, int] = {}  # by the address of who sent from there
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self.rules: Rules = {}

    def take(self, port: int) -> None:
        """Reads what has come to a port, and lets it wait for its time."""
        for _ in range(MOST_AT_ONCE):
            try:
                frame = os.read(self._ports[port], FRAME_BYTES)
            except BlockingIOError:
                return
            self._port_of[frame[6:12]] = port
            known = self._port_of.get(frame[:6])
            for to in [known] if known is not None else [i for i in range(len(self._ports)) if i != port]:
                lost, delay_s = self.rules.get((port, to), (0.0, 0.0))
                if self._rng.random() >= lost:
                    self._count += 1
                    heapq.heappush(self._waiting, (time.monotonic() + delay_s, self._count, to, frame))

    def give(self) -> float:
        """Sends what is due; returns the seconds until more is."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(self._waiting)
            try:
                os.write(self._ports[to], frame)
            except OSError:
                continue  # its queue is full, or the device is down: lost, as in any network
        return min(IDLE_S, max(0.0, self._waiting[0][0] - time.monotonic())) if self._waiting else IDLE_S


def main(ports: list[int]) -> None:
    switch, selector, text = Switch(ports), selectors.DefaultSelector(), b""
    for number, port in enumerate(ports):
        os.set_blocking(port, False)
        selector.register(port, selectors.EVENT_READ, number)
    selector.register(0, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select(switch.give()):
            if key.data is not None:
                switch.take(key.data)
                continue
            more = os.read(0, FRAME_BYTES)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                switch.rules = {(a, b): (lost, delay_s) for a, b, lost, delay_s in json.loads(line)}


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
