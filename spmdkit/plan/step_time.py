"""`predict_time`: the time of one step, by a walk through the schedule of the compiled program, and the bill.

    instruction       CYCLES x the compiler's cycles / clock where it reports them (TPU), otherwise
                      max(FLOPs / arithmetic, bytes / memory) + launch
    collective        bytes sent / rate of the link + hops x latency (links.py), after those ahead of it on that link
    blocking          the device waits for it
    start and done    the instructions between the two run meanwhile; at the done the device waits for the rest
    fake GPUs         collectives of data parallelism start when their operands are ready; the first reader waits
    loop              the time of its body x trip count
    step              the end of the last instruction + transfers of state from and to host memory + the host's call

The part of a collective in which the device waits is *exposed*. Instructions run one at a time. Collectives on
different links (two ICI dims, NVLink and the network) run concurrently.

FLOPs are read from the program, so repeated work and recomputation (remat) cost time here. MFU is a share of model
FLOPs, counted from the jaxpr without remat. The bytes of an instruction are its reads and writes in main memory.
Caches, stragglers and other traffic are not modelled; without cycles, nor is the fill of the matrix unit.

Source: Williams, Waterman, Patterson, "Roofline" (CACM 2009); "How to Scale Your Model", chapter "All About Rooflines".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdkit.foundation.formatting import shown_axes
from spmdkit.plan.attribution import OF_DATA_PARALLELISM
from spmdkit.plan.collectives_bill import Bill, Collective
from spmdkit.plan.costs import Costs
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.collectives import OPCODES
from spmdkit.plan.hlo.source import op_name_of, source_of
from spmdkit.plan.hlo.text import Computation, Instruction, Module
from spmdkit.plan.hlo.tpu_forms import chain_of, ended_chain, estimated_cycles
from spmdkit.plan.kernels import target_of
from spmdkit.plan.machine.links import LinkPath, link_path_of
from spmdkit.plan.machine.target import Target
from spmdkit.plan.timeline import BUBBLE, Loop, Timeline, layer_of
from spmdkit.step import trace_context

CYCLES = 0.86
"""Time of an instruction / (estimated cycles / clock): one factor for v5e, v5p, v6e and 7x. It is below one, since the
compiler adds the cycles of the matrix and the vector unit, which work at the same time. Fitted to published runs, with
kernels and exposed collectives (docs/published.md)."""
_HOST_SPACE = 5
_TICKS = re.compile(rf"{trace_context.PIPELINE}\)*/while/body")
"""In the op name of an instruction that the stages of a pipeline run in each tick."""
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "f64": "float32"}
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain", "opt-barrier",
    "optimization-barrier", "partition-id", "replica-id", "iota", "add-dependency", "async-update",
}  # fmt: skip
"""Operations without a cost; they pass on the result of a collective that is not complete."""
_MARKERS = (
    "ConcatBitcast",
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "PrepareAsyncCallStart",
    "PrepareAsyncCallDone",
)
"""Custom calls of the TPU compiler that do nothing on the device."""


@dataclass(frozen=True)
class LinkTime:
    """Seconds per step that a device's links of one kind are busy, and the part for which the device waits."""

    busy_s: float
    exposed_s: float
    bytes: int


@dataclass(frozen=True)
class LineTime:
    """What one line of the program takes of a step.

    Attributes:
        seconds: part (`arithmetic`, `memory`, `launch`, `host`) -> seconds, without the bubble of a pipeline.
        exposed_s: seconds in which the device waits for the line's collectives.
        flops: of products on one device.
    """

    seconds: Mapping[str, float]
    exposed_s: float
    flops: float

    @property
    def total_s(self) -> float:
        """Seconds of instructions, and those in which the device waits."""
        return sum(self.seconds.values()) + self.exposed_s


@dataclass(frozen=True)
class Time:
    """Predicted time of one step.

    Attributes:
        seconds: `arithmetic`, `memory`: instructions bound by the matrix unit or by main memory; `launch`: starting
            instructions; `host`: transfers of state from and to host memory.
        links: `ici fsdp` (the link and the mesh axes) -> seconds.
        hlo_flops: FLOPs of products on one device, all executions.
        memory_bytes: bytes that one device reads and writes.
        guessed: number of loops of unknown length, which count as one iteration.
        lines: `file.py:12` -> its part of the step; None: instructions without a line, and what the host does.
        layer: the loop that takes most of the step, with the timeline of one iteration; None: no loop does.
        whole: the timeline of the step.
    """

    seconds: dict[str, float]
    links: Mapping[str, LinkTime]
    hlo_flops: float
    memory_bytes: float
    guessed: int = 0
    lines: Mapping[str | None, LineTime] = field(default_factory=dict)
    layer: Loop | None = None
    whole: Timeline = field(default_factory=Timeline, repr=False)

    @property
    def step_s(self) -> float:
        """The predicted time of the step."""
        return sum(self.seconds.values()) + sum(link.exposed_s for link in self.links.values())

    @property
    def bound(self) -> str:
        """The part that takes most of the step."""
        parts = {name.replace("host", "host memory"): s for name, s in self.seconds.items()}
        parts |= {f"link {name}": link.exposed_s for name, link in self.links.items()}
        return max(parts, key=lambda name: parts[name])

    def parts(self) -> dict[str, float]:
        """Returns part of the step -> seconds; their sum is the time of the step."""
        named = self.seconds | {name: link.exposed_s for name, link in self.links.items()}
        return {name: seconds for name, seconds in named.items() if seconds > 0}


def predict_time(
    target: Target,
    module: Module,
    bill: Bill,
    devices: Sequence[Any],
    *,
    scans: Mapping[str, int] | None = None,
    host_bytes: int = 0,
    call_s: float = 0.0,
    idle: float = 0.0,
) -> Time:
    """Returns the predicted time of one step.

    Args:
        devices: of the mesh, flattened.
        scans: op_name -> length of the jaxpr's scans, for loops without a trip count in the HLO text.
        host_bytes: state of one device that is stored in host memory between steps; used if the text shows no transfer
            from or to host memory.
        call_s: host time of one call of the step.
        idle: share of the executions of a pipeline's stages that is its bubble (`jaxpr_lines.idle_share`).
    """
    walk = _Walk(target, module, bill, devices, scans, idle)
    step = walk.timeline(module.entry, None)
    step.seconds["launch", None] += call_s
    if not walk.has_host_transfers:
        step.seconds["host", None] += 2 * host_bytes / target.chip.host_link.bytes_per_s
    seconds = dict.fromkeys(("arithmetic", "memory", "launch", "host", BUBBLE), 0.0)
    for (part, _), num_s in step.seconds.items():
        seconds[part] += num_s
    exposed, sent = defaultdict[str, float](float), defaultdict[str, int](int)
    for (name, _), num_s in step.exposed.items():
        exposed[name] += num_s
    for c in bill.collectives:
        if c.counted:
            sent[_link_name(link_path_of(target, devices, c), c)] += c.bytes_at_least
    order = sorted(sent, key=lambda name: -step.busy[name])
    links = {name: LinkTime(step.busy[name], exposed[name], sent[name]) for name in order}
    flops = sum(step.flops.values())
    loop = layer_of(step)
    return Time(seconds, links, flops, step.num_bytes, len(walk.unknown_loops), _lines(step), loop, step)


def _lines(step: Timeline) -> dict[str | None, LineTime]:
    """Returns line -> its part of the step, the longest first."""
    seconds = defaultdict[str | None, dict[str, float]](dict)
    for (part, source), num_s in step.seconds.items():
        if num_s and part != BUBBLE:
            seconds[source][part] = num_s
    exposed = defaultdict[str | None, float](float)
    for (_, source), num_s in step.exposed.items():
        exposed[source] += num_s
    lines = {s: LineTime(seconds[s], exposed[s], step.flops.get(s, 0.0)) for s in (*seconds, *exposed)}
    return dict(sorted(lines.items(), key=lambda item: -item[1].total_s))


def _link_name(path: LinkPath, c: Collective) -> str:
    return f"{path.link} {shown_axes(c.axes) or 'all'}"


def _named(dtype: str) -> str:
    """Returns the name of a dtype of HLO in the chip table."""
    return "float8" if dtype.startswith("f8") else _DTYPES.get(dtype, dtype)


class _Walk:
    """Walks through the computations of a program in the order of the schedule."""

    def __init__(
        self,
        target: Target,
        module: Module,
        bill: Bill,
        devices: Sequence[Any],
        scans: Mapping[str, int] | None,
        idle: float,
    ):
        self._target, self._module, self._scans, self._idle = target, module, scans, idle
        self._costs = Costs(module)
        self._collectives = {c.names[0]: (c, link_path_of(target, devices, c)) for c in bill.collectives}
        self._lines: dict[str, str | None] = {}
        self.unknown_loops: set[str] = set()
        self.has_host_transfers = False

    def timeline(self, computation: Computation, site: loops.Site | None) -> Timeline:
        """Returns one execution of a computation."""
        line = Timeline()
        for i in computation.instructions:
            awaited = [line.pending[name] for name in i.operands if name in line.pending]
            if i.opcode in _FREE:
                if awaited:
                    line.pending[i.name] = max(awaited, key=lambda transfer: transfer.finish_s)
                line.ready_s[i.name] = line.operands_ready_s(i)
                continue
            for transfer in awaited:
                line.wait(transfer)
            self._execute(i, line, loops.Site(i, site))
            line.ready_s[i.name] = line.now_s
        for transfer in line.pending.values():
            line.wait(transfer)
        for name, source in [key for key in line.exposed if key[0] in ("memory", "host")]:  # waits for copies
            line.seconds[name, source] += line.exposed.pop((name, source))
        return line

    def _execute(self, i: Instruction, line: Timeline, inside: loops.Site) -> None:
        called: Callable[[str], list[Timeline]] = lambda role: [
            self.timeline(self._module.computations[name], inside) for name in i.called.get(role, ())
        ]
        if i.opcode == "while":
            trips = loops.trip_count(self._module, i, inside.outer, self._scans)
            if trips is None:
                self.unknown_loops.add(i.name)
            for role, extra in (("body", 0), ("condition", 1)):
                for inner in called(role):
                    times = 1 if trips is None else trips + extra
                    line.add(f"{times} x {i.name}", inner, times, i if role == "body" else None)
        elif i.opcode == "conditional":
            line.add(i.name, max(called("branch_computations"), key=lambda branch: branch.now_s))
        elif i.opcode == "call":
            for inner in called("to_apply"):
                line.add(i.name, inner)
        elif sent := list(self._sent_by(i)):
            self._communicate(i, sent, line)
        elif i.opcode.endswith("-start"):
            self._start(i, called(loops.CALLS.get(i.opcode, "")), line)
        elif i.opcode == "recv-done":
            if received := next((name for name in line.pending if name.startswith("received ")), None):
                line.wait(line.pending.pop(received))
        elif not i.opcode.endswith("-done"):
            self._compute(i, line)
        if (chain := ended_chain(self._module, i)) is not None and chain in line.pending:
            line.wait(line.pending.pop(chain))

    def _sent_by(self, i: Instruction) -> Iterator[Instruction]:
        """Yields the collectives that an instruction is or calls."""
        if i.name in self._collectives:
            yield i
        elif i.opcode in loops.CALLS:
            for name in i.called.get(loops.CALLS[i.opcode], ()):
                for inner in self._module.computations[name].instructions:
                    yield from self._sent_by(inner)

    def _communicate(self, i: Instruction, sent: Sequence[Instruction], line: Timeline) -> None:
        """Starts the collectives of an instruction; waits for them unless a later instruction does."""
        blocking = []
        for inner in sent:
            c, path = self._collectives[inner.name]
            early = self._starts_early(c)
            begin_s = line.operands_ready_s(i) if early else line.now_s
            seconds = path.seconds(c.bytes_once, c.op, c.group_size)
            transfer = line.start(_link_name(path, c), path.channels, seconds, begin_s, inner.name, c.source)
            if inner.opcode == "send":
                line.pending[f"received {i.name}"] = transfer
            elif i.opcode.endswith("-start") or early:
                line.pending[i.name] = transfer
            elif c.is_async:
                line.pending[chain_of(inner)] = transfer
            else:
                blocking.append(transfer)
        if i.opcode == "fusion":
            self._compute(i, line)
        for transfer in blocking:
            line.wait(transfer)

    def _starts_early(self, c: Collective) -> bool:
        """Returns whether a collective runs beside the instructions though the text does not show it: XLA's GPU
        scheduler starts those of data parallelism when their operands are ready; fake devices have no async ones."""
        return self._target.chip.kind == "gpu" and self._target.compiler == "cpu" and c.cause in OF_DATA_PARALLELISM

    def _start(self, i: Instruction, called: Sequence[Timeline], line: Timeline) -> None:
        """Starts a copy, or a computation, that runs beside the instructions."""
        chip, num_bytes = self._target.chip, self._costs.bytes(i)
        arrays = [*i.shapes, *(shape for operand in self._module.operands(i) for shape in operand.shapes)]
        if any(shape.space == _HOST_SPACE for shape in arrays):
            self.has_host_transfers = True
            seconds = min(shape.bytes for shape in i.shapes[:2]) / chip.host_link.bytes_per_s
            line.pending[i.name] = line.start("host", ("host",), seconds, line.now_s, i.name, self._line_of(i))
            return
        seconds = sum(inner.now_s for inner in called) if called else chip.memory_s(num_bytes)
        for inner in called:
            for source, flops in inner.flops.items():
                line.flops[source] += flops
        line.num_bytes += sum(inner.num_bytes for inner in called) if called else num_bytes
        line.pending[i.name] = line.start("memory", ("memory",), seconds, line.now_s, i.name, self._line_of(i))

    def _compute(self, i: Instruction, line: Timeline) -> None:
        chip, cycles = self._target.chip, estimated_cycles(i) if self._target.chip.clock_hz else None
        flops, num_bytes = self._costs.flops(i), self._costs.bytes(i)
        if not (flops or cycles or (num_bytes and self._is_work(i))):
            return
        by_dtype = defaultdict[str, float](float)
        for (dtype, passes), num in flops.items():
            by_dtype[_named(dtype)] += passes * num
        arithmetic_s = chip.kernel_s(by_dtype) if i.opcode == "custom-call" else chip.products_s(by_dtype)
        memory_s = chip.memory_s(num_bytes)
        seconds = {"launch": chip.launch_s} if cycles is None else {}
        part = "arithmetic" if arithmetic_s > memory_s else "memory"
        seconds[part] = max(arithmetic_s, memory_s) if cycles is None else CYCLES * cycles / chip.clock_hz
        idle, source = self._idle if self._is_in_ticks(i) else 0.0, self._line_of(i)
        parts = {name: (1 - idle) * num_s for name, num_s in seconds.items()}
        line.run(i.name, source, parts | ({BUBBLE: idle * sum(seconds.values())} if idle else {}))
        line.flops[source] += sum(flops.values())
        line.num_bytes += num_bytes

    def _line_of(self, i: Instruction) -> str | None:
        """Returns the line of an instruction; of a fusion, that of its largest product."""
        if i.name not in self._lines:
            inside = self._module.fused(i).instructions if i.opcode == "fusion" else ()
            largest = max(inside, key=lambda j: sum(self._costs.flops(j).values()), default=i)
            has_product = bool(self._costs.flops(largest)) and bool(self._module.frames(largest))
            self._lines[i.name] = source_of(self._module, largest if has_product else i)
        return self._lines[i.name]

    def _is_in_ticks(self, i: Instruction) -> bool:
        """Returns whether an instruction is in a loop over the ticks of a pipeline."""
        return bool(self._idle) and _TICKS.search(op_name_of(self._module, i)) is not None

    def _is_work(self, i: Instruction) -> bool:
        """Returns whether an instruction without FLOPs moves data itself: markers do not, nor do fusions that only
        start, send or end a collective."""
        if i.opcode == "custom-call":
            return target_of(i) not in _MARKERS
        return i.opcode != "fusion" or not any(inner.opcode in OPCODES for inner in self._module.fused(i).instructions)
