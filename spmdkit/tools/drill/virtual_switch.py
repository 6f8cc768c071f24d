"""A switch in user space: carries the frames between the TAP devices of a drill's hosts, and loses, delays or slows
them on order. Run by its path, by network.py.

    python -I -S virtual_switch.py DESCRIPTOR ...

Each line on standard input is a JSON list of rules `[from, to, lost, delay_s, bytes_per_s]` that takes the place of the
one before: ports are numbers of descriptors, `lost` a part of the frames, from 0 to 1, and `bytes_per_s` what passes at
most, by a token bucket, 0 without a limit. What would wait longer than MOST_QUEUED_S is lost, as in a router whose
queue is full. Ends with its standard input. Not every kernel has netem, and netem knows no pairs; 3.4 Gbit/s with two
hosts (shared/probes, 2026-11-22).
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
BURST_BYTES, MOST_QUEUED_S = 65536, 0.2
"""What a bucket holds, and how long a frame waits for tokens at most."""

Rules = dict[tuple[int, int], tuple[float, float, float]]


class Bucket:
    """Tokens of one way, counted as the time at which the last of them is used up: `rate` bytes a second, up to
    BURST_BYTES saved."""

    def __init__(self) -> None:
        self._used_up = float("-inf")

    def wait_s(self, size: int, rate: float, now: float) -> float | None:
        """Returns the seconds until so many bytes may pass, and takes their tokens; None where the queue is full."""
        used_up = max(self._used_up, now - BURST_BYTES / rate) + size / rate
        if used_up - now > MOST_QUEUED_S:
            return None
        self._used_up = used_up
        return max(0.0, used_up - now)


class Switch:
    """Frames between `ports`, open descriptors of TAP devices."""

    def __init__(self, ports: list[int]):
        self._ports, self._rng = ports, random.Random(0)
        self._port_of: dict[bytes, int] = {}  # by the address of who sent from there
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._buckets: dict[tuple[int, int], Bucket] = {}
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
                lost, delay_s, rate = self.rules.get((port, to), (0.0, 0.0, 0.0))
                now, queued_s = time.monotonic(), 0.0 if self._rng.random() >= lost else None
                if queued_s is not None and rate:
                    queued_s = self._buckets.setdefault((port, to), Bucket()).wait_s(len(frame), rate, now)
                if queued_s is not None:
                    self._count += 1
                    heapq.heappush(self._waiting, (now + queued_s + delay_s, self._count, to, frame))

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
                switch.rules = {(a, b): (lost, delay_s, rate) for a, b, lost, delay_s, rate in json.loads(line)}


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
