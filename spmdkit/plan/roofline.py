"""`predict_time`: the time of one step, from the compiled program, instruction by instruction, and the bill.

    instruction   max(FLOPs / arithmetic, bytes / memory) + launch, times its executions
    collective    bytes sent / rate of the link + hops x latency (links.py)
    a loop's body, or the rest of the program:
                  instructions + blocking collectives + the time of async collectives beyond the instructions
    step          the sum of these + transfers of state from and to host memory + the host's call

FLOPs are read from the program, so repeated work and recomputation (remat) cost time here. MFU is a share of model
FLOPs, counted from the jaxpr without remat. The bytes of an instruction are its reads and writes in main memory.
Caches, stragglers, other traffic and the fill of the matrix unit are not modelled: compare plans with each other.

Source: Williams, Waterman, Patterson, "Roofline" (CACM 2009); "How to Scale Your Model", chapter "All About Rooflines".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdkit.foundation.formatting import shown_axes
from spmdkit.mesh.chips import Chip
from spmdkit.plan.attribution import OF_DATA_PARALLELISM
from spmdkit.plan.collectives_bill import Bill, Collective
from spmdkit.plan.costs import Costs
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.text import Module
from spmdkit.plan.machine.links import link_path_of
from spmdkit.plan.machine.target import Target

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "f64": "float32"}
_COST_NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all", "domain",  # noqa: E501
    "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "copy-done", "slice-done", "dynamic-slice-done",  # noqa: E501
    "async-start", "async-done", "async-update", "call-start", "call-done", "iota", "add-dependency",
}  # fmt: skip


@dataclass(frozen=True)
class LinkTime:
    """Seconds per step that a device's links of one kind are busy, and the part that nothing overlaps."""

    busy_s: float
    exposed_s: float
    bytes: int


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
    """

    seconds: dict[str, float]
    links: Mapping[str, LinkTime]
    hlo_flops: float
    memory_bytes: float
    guessed: int = 0

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


@dataclass
class _Region:
    """One loop body, or the program outside all loops: seconds of its instructions, and of each link."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    started: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, chip: Chip, runs: int, flops: Mapping[tuple[str, int], float], num_bytes: int) -> None:
        """Adds the executions of an instruction: its arithmetic or memory time, the larger of the two, and launches."""
        arithmetic_s = sum(
            chip.products_s({_DTYPES.get(dtype, dtype): passes * f}) for (dtype, passes), f in flops.items()
        )
        memory_s = chip.memory_s(num_bytes)
        self.seconds["arithmetic" if arithmetic_s > memory_s else "memory"] += runs * max(arithmetic_s, memory_s)
        self.seconds["launch"] += runs * chip.launch_s

    def exposed(self) -> dict[str, float]:
        """Returns link -> seconds that nothing overlaps: blocking collectives, async ones beyond the instructions."""
        remaining, seconds_of = sum(self.seconds.values()), dict(self.waits)
        for name, seconds in sorted(self.started.items(), key=lambda item: -item[1]):
            seconds_of[name] = seconds_of.get(name, 0.0) + max(0.0, seconds - remaining)
            remaining = max(0.0, remaining - seconds)
        return seconds_of


def predict_time(
    target: Target,
    module: Module,
    bill: Bill,
    devices: Sequence[Any],
    *,
    scans: Mapping[str, int] | None = None,
    host_bytes: int = 0,
    call_s: float = 0.0,
) -> Time:
    """Returns the predicted time of one step.

    Args:
        devices: of the mesh, flattened.
        scans: op_name -> length of the jaxpr's scans, for loops without a trip count in the HLO text.
        host_bytes: state of one device that is stored in host memory between steps.
        call_s: host time of one call of the step.
    """
    regions: dict[tuple[str, ...], _Region] = defaultdict(_Region)
    hlo_flops, memory_bytes, guessed = _add_instructions(regions, target.chip, module, bill, scans)
    links = _add_links(regions, target, devices, bill)
    seconds = {name: sum(r.seconds[name] for r in regions.values()) for name in ("arithmetic", "memory", "launch")}
    seconds["launch"] += call_s
    seconds["host"] = 2 * host_bytes / target.chip.host_link.bytes_per_s
    return Time(seconds, links, hlo_flops, memory_bytes, guessed)


def _add_instructions(
    regions: dict[tuple[str, ...], _Region], chip: Chip, module: Module, bill: Bill, scans: Mapping[str, int] | None
) -> tuple[float, float, int]:
    """Adds the seconds of each instruction that is not a collective to its region. Returns the FLOPs and bytes of all
    executions, and the number of loops of unknown length."""
    costs, unknown, total_flops, total_bytes = Costs(module), set[str](), 0.0, 0.0
    on_wire = {name for c in bill.collectives for name in c.names}
    for visit in loops.walk(module, scans):
        i = visit.instruction
        if visit.runs is None and visit.loops:
            unknown.add(visit.loops[-1].name)
        if i.opcode in _COST_NOTHING or i.name in on_wire or visit.is_fused:
            continue
        flops, num_bytes, runs = costs.flops(i), costs.bytes(i), visit.known_runs
        if flops or num_bytes:
            regions[tuple(loop.name for loop in visit.loops)].add(chip, runs, flops, num_bytes)
            total_flops += runs * sum(flops.values())
            total_bytes += runs * num_bytes
    return total_flops, total_bytes, len(unknown)


def _add_links(
    regions: dict[tuple[str, ...], _Region], target: Target, devices: Sequence[Any], bill: Bill
) -> dict[str, LinkTime]:
    """Adds the seconds of each collective to its region; returns the time of each link, the busiest first."""
    busy: dict[str, float] = defaultdict(float)
    sent: dict[str, int] = defaultdict(int)
    for c in bill.collectives:
        if c.counted:
            link = link_path_of(target, devices, c)
            name = f"{link.link} {shown_axes(c.axes) or 'all'}"
            seconds = link.seconds(c.bytes_at_least, c.op, c.group_size, c.trip_count or 1)
            busy[name] += seconds
            sent[name] += c.bytes_at_least
            region = regions[c.loop_names]
            (region.started if _overlaps(target, c) else region.waits)[name] += seconds
    exposed: dict[str, float] = defaultdict(float)
    for region in regions.values():
        for name, seconds in region.exposed().items():
            exposed[name] += seconds
    return {name: LinkTime(busy[name], exposed[name], sent[name]) for name in sorted(busy, key=lambda n: -busy[n])}


def _overlaps(target: Target, c: Collective) -> bool:
    """Returns whether arithmetic overlaps a collective. XLA's GPU scheduler overlaps those of data parallelism; the
    program of the fake devices does not show which are async."""
    return c.is_async or (target.chip.kind == "gpu" and target.compiler == "cpu" and c.cause in OF_DATA_PARALLELISM)
