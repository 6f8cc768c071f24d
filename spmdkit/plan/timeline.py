"""The timeline of one device: instructions run one at a time, transfers run on their links meanwhile.

A `Timeline` is one execution of a computation. It stores every instruction, every transfer and every wait, so that one
iteration of a loop can be drawn, and the seconds of each line of the user's program add up to those of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spmdkit.plan.hlo.text import Instruction

BUBBLE = "pipeline bubble"
"""The part of a step in which the stages of a pipeline compute what is discarded."""


class Span(NamedTuple):
    """A part of a row of a drawn timeline.

    Attributes:
        row: `compute`, or the name of a link.
        kind: `run`, `loop` (all iterations of an inner loop), `transfer`, or `wait`: the device waits for a transfer.
        name: of the instruction.
        source: `file.py:12`, or None.
    """

    row: str
    kind: str
    name: str
    source: str | None
    start_s: float
    end_s: float


@dataclass(eq=False)
class Transfer:
    """A collective, or a copy, that runs while instructions run.

    Attributes:
        name: of the link in `Time.links`, or of the part in `Time.seconds`.
        channels: what it occupies; transfers on one channel run one after the other.
        ahead: the transfer that it waits for.
        label: the instruction that starts it.
        source: its line.
    """

    name: str
    channels: tuple[str, ...]
    begin_s: float
    finish_s: float
    ahead: Transfer | None
    label: str
    source: str | None


class Loop(NamedTuple):
    """A loop, its iterations, and one of them."""

    instruction: Instruction
    iterations: int
    body: Timeline


def _zeros() -> dict[tuple[str, str | None], float]:
    return defaultdict(float)


@dataclass(eq=False)
class Timeline:
    """One execution of a computation, from its start.

    Attributes:
        seconds: (part, line) -> seconds of instructions.
        exposed: (name of a transfer, line) -> the seconds in which the device waits for it.
        flops: line -> FLOPs.
        busy: name of a transfer -> its seconds.
        occupied: channel -> seconds.
        last: channel -> the transfer that was started last.
        pending: instruction -> the transfer that a reader of its result waits for.
        ready_s: instruction -> time at which its result is complete.
        loops: the loops that run in it.
    """

    now_s: float = 0.0
    num_bytes: float = 0.0
    seconds: dict[tuple[str, str | None], float] = field(default_factory=_zeros)
    exposed: dict[tuple[str, str | None], float] = field(default_factory=_zeros)
    flops: dict[str | None, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    occupied: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: dict[str, Transfer] = field(default_factory=dict)
    pending: dict[str, Transfer] = field(default_factory=dict)
    ready_s: dict[str, float] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    _transfers: list[Transfer] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)

    def run(self, name: str, source: str | None, parts: dict[str, float]) -> None:
        """Adds the time of an instruction, by part."""
        begin_s = self.now_s
        for part, seconds in parts.items():
            self.seconds[part, source] += seconds
            self.now_s += seconds
        self._spans.append(Span("compute", "run", name, source, begin_s, self.now_s))

    def operands_ready_s(self, i: Instruction) -> float:
        """Returns the time at which all operands of an instruction are complete."""
        return max((self.ready_s.get(name, 0.0) for name in i.operands), default=0.0)

    def start(
        self, name: str, channels: tuple[str, ...], seconds: float, begin_s: float, label: str, source: str | None
    ) -> Transfer:
        """Starts a transfer at `begin_s`, or when the earlier ones on its channels are complete."""
        queue = [self.last[channel] for channel in channels if channel in self.last]
        ahead = max(queue, key=lambda transfer: transfer.finish_s, default=None)
        begin_s = begin_s if ahead is None else max(begin_s, ahead.finish_s)
        transfer = Transfer(name, channels, begin_s, begin_s + seconds, ahead, label, source)
        self._transfers.append(transfer)
        self.busy[name] += seconds
        for channel in channels:
            self.occupied[channel] += seconds
            self.last[channel] = transfer
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Waits for the end of a transfer; the time of those ahead of it on its channel is theirs."""
        queue: list[Transfer] = []
        last: Transfer | None = transfer
        while last is not None and last.finish_s > self.now_s:
            queue.append(last)
            last = last.ahead
        for running in reversed(queue):
            if running.finish_s > self.now_s:
                self.exposed[running.name, running.source] += running.finish_s - self.now_s
                name, source = f"waits for {running.name}: {running.label}", running.source
                self._spans.append(Span("compute", "wait", name, source, self.now_s, running.finish_s))
                self.now_s = running.finish_s

    def add(self, name: str, inner: Timeline, times: int = 1, loop: Instruction | None = None) -> None:
        """Adds the executions of a called computation, or the iterations of a loop. Its transfers delay the running
        ones on the same channels."""
        for transfer in {*self.last.values(), *self.pending.values()}:
            if transfer.finish_s > self.now_s:
                transfer.finish_s += times * max(inner.occupied[channel] for channel in transfer.channels)
        self.loops += inner.loops if loop is None else [Loop(loop, times, inner)]
        end_s = self.now_s + times * inner.now_s
        self._spans.append(Span("compute", "run" if loop is None else "loop", name, None, self.now_s, end_s))
        self.now_s = end_s
        self.num_bytes += times * inner.num_bytes
        self._add(self.seconds, inner.seconds, times)
        self._add(self.exposed, inner.exposed, times)
        for total, part in ((self.flops, inner.flops), (self.busy, inner.busy), (self.occupied, inner.occupied)):
            self._add(total, part, times)

    @staticmethod
    def _add(total: dict, part: dict, times: int) -> None:  # type: ignore[type-arg]
        for key, number in part.items():
            total[key] += times * number

    def spans(self) -> Iterator[Span]:
        """Yields what each row does: the instructions and the waits, and the transfers of each link. Transfers of one
        link that overlap, on different channels, are in rows of their own."""
        yield from (span for span in self._spans if span.end_s > span.start_s)
        ends: dict[str, list[float]] = defaultdict(list)
        for t in sorted(self._transfers, key=lambda transfer: transfer.begin_s):
            if t.finish_s <= t.begin_s:
                continue
            of_link = ends[t.name]
            number = next((n for n, end_s in enumerate(of_link) if end_s <= t.begin_s), len(of_link))
            of_link[number : number + 1] = [t.finish_s]
            row = t.name if number == 0 else f"{t.name} ({number + 1})"
            yield Span(row, "transfer", t.label, t.source, t.begin_s, t.finish_s)


def layer_of(step: Timeline) -> Loop | None:
    """Returns the loop that takes most of a step, or the inner loop that takes most of that one; None if no loop takes
    a tenth of the step."""
    chosen: Loop | None = None
    around, least = step, 0.1
    while around.loops:
        largest = max(around.loops, key=lambda loop: loop.iterations * loop.body.now_s)
        if largest.iterations * largest.body.now_s < least * around.now_s:
            break
        chosen, around, least = largest, largest.body, 0.5
    return chosen
