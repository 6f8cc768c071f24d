"""`predict_time`: how long one step takes, from the compiled program, instruction by instruction, and the bill.

    instruction   max(FLOPs / arithmetic, bytes / memory) + launch, times its executions
    collective    bytes sent / way + hops x latency (links.py)
    a loop's body, or the rest of the program:
                  instructions + collectives that wait + what the started ones (async) need beyond the instructions
    step          all of these, + state that lives in host memory, in and out, + the host's call

The FLOPs of an instruction are read from the program, so what a device does in vain (an axis that repeats work) and what is
computed twice (remat) costs time here. Model FLOPs, of which MFU is a share, are counted from the jaxpr without remat. Bytes
of an instruction are what it reads and writes in main memory; of a slice of a stacked array, the slice.

What it does not know: who finds his operands in a cache (small ones do, on CPU), stragglers, traffic of others on the links,
how well a particular product fills the matrix unit. Compare it with itself: the order of plans is what it is good at.

Source: Williams, Waterman, Patterson, "Roofline" (CACM 2009); "How to Scale Your Model", chapter "All About Rooflines".
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdkit.plan.bill import Bill, Collective
from spmdkit.plan.flops import valid_pairs
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.text import Computation, Instruction, Module
from spmdkit.plan.machine.links import way_of
from spmdkit.plan.machine.target import Target

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "f64": "float32"}
_COST_NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all", "domain",
    "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "copy-done", "slice-done", "dynamic-slice-done",
    "async-start", "async-done", "async-update", "call-start", "call-done", "iota", "add-dependency",
}  # fmt: skip
_SLICES = ("dynamic-slice", "gather", "slice")
OVERLAPPED_ON_GPU = frozenset({"parameter gather", "gradient reduction", "gradient scatter", "update gather"})
"""Causes that XLA's GPU scheduler hides behind arithmetic; the fake devices' program does not say which are started early."""


@dataclass(frozen=True)
class LinkTime:
    """Seconds that a device's links of one kind are busy in a step, and how many of them nothing hides."""

    busy_s: float
    exposed_s: float
    bytes: int


@dataclass(frozen=True)
class Time:
    """Predicted time of one step.

    Attributes:
        step_s: all of it.
        arithmetic_s: instructions that the matrix unit bounds.
        memory_s: instructions that main memory bounds.
        launch_s: starting instructions.
        host_s: state that comes from and goes to host memory.
        links: `ici fsdp` -> seconds; the way and the mesh axes.
        hlo_flops: products that one device computes, all executions.
        memory_bytes: that one device reads and writes.
        bound: what takes most of the step.
        guessed: loops of unknown length, which were taken to run once.
    """

    step_s: float
    arithmetic_s: float
    memory_s: float
    launch_s: float
    host_s: float
    links: Mapping[str, LinkTime]
    hlo_flops: float
    memory_bytes: float
    bound: str
    guessed: int = 0

    @property
    def exposed_s(self) -> float:
        """Seconds of collectives that nothing hides."""
        return sum(link.exposed_s for link in self.links.values())

    def parts(self) -> dict[str, float]:
        """Returns part of the step -> seconds; they add up to the step."""
        named = {"arithmetic": self.arithmetic_s, "memory": self.memory_s, "launch": self.launch_s, "host": self.host_s}
        named |= {name: link.exposed_s for name, link in self.links.items()}
        return {name: seconds for name, seconds in named.items() if seconds > 0}


@dataclass
class _Region:
    """One loop's body, or the program outside of all loops."""

    arithmetic_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    started: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def device_s(self) -> float:
        return self.arithmetic_s + self.memory_s + self.launch_s

    def exposed(self) -> dict[str, float]:
        """Returns link -> seconds that nothing hides: what waits, and what is started and outlasts the instructions."""
        left, found = self.device_s, dict(self.waits)
        for name, seconds in sorted(self.started.items(), key=lambda item: -item[1]):
            found[name] = found.get(name, 0.0) + max(0.0, seconds - left)
            left = max(0.0, left - seconds)
        return found


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
        scans: op_name -> length of the jaxpr's scans, for loops whose text does not tell.
        host_bytes: state of one device that lives in host memory between steps.
        call_s: what the host needs for one call of the step.
    """
    chip = target.chip
    regions: dict[tuple[str, ...], _Region] = defaultdict(_Region)
    costs = _Costs(module)
    products = traffic = 0.0
    guessed = set[str]()
    on_wire = {name for c in bill.collectives for name in c.names}
    for visit in loops.walk(module, scans):
        i = visit.instruction
        if visit.runs is None and visit.loops:
            guessed.add(visit.loops[-1].name)
        if i.opcode in _COST_NOTHING or i.name in on_wire or _inside_fusion(visit.site):
            continue
        flops, num_bytes = costs.flops(i), costs.bytes(i)
        if not flops and not num_bytes:
            continue
        runs = visit.known_runs
        arithmetic_s = sum(
            passes * f / (chip.peak(_DTYPES.get(dtype, dtype)) * chip.reached.matmul)
            for (dtype, passes), f in flops.items()
        )
        memory_s = chip.memory_s(num_bytes)
        region = regions[tuple(loop.name for loop in visit.loops)]
        if arithmetic_s > memory_s:
            region.arithmetic_s += runs * arithmetic_s
        else:
            region.memory_s += runs * memory_s
        region.launch_s += runs * chip.launch_s
        products += runs * sum(flops.values())
        traffic += runs * num_bytes
    busy: dict[str, float] = defaultdict(float)
    sent: dict[str, int] = defaultdict(int)
    for c in bill.collectives:
        if c.counted:
            name, seconds = _collective(target, devices, c)
            busy[name] += seconds
            sent[name] += c.bytes_at_least
            region = regions[c.loop_names]
            (region.started if _overlaps(target, c) else region.waits)[name] += seconds
    exposed: dict[str, float] = defaultdict(float)
    for region in regions.values():
        for name, seconds in region.exposed().items():
            exposed[name] += seconds
    links = {name: LinkTime(busy[name], exposed[name], sent[name]) for name in sorted(busy, key=lambda n: -busy[n])}
    host_s = 2 * host_bytes / chip.host_link.bytes_per_s
    parts = {
        "arithmetic": sum(r.arithmetic_s for r in regions.values()),
        "memory": sum(r.memory_s for r in regions.values()),
        "launch": sum(r.launch_s for r in regions.values()) + call_s,
        "host memory": host_s,
        **{f"link {name}": link.exposed_s for name, link in links.items()},
    }
    return Time(
        step_s=sum(parts.values()),
        arithmetic_s=parts["arithmetic"],
        memory_s=parts["memory"],
        launch_s=parts["launch"],
        host_s=host_s,
        links=links,
        hlo_flops=products,
        memory_bytes=traffic,
        bound=max(parts, key=lambda name: parts[name]),
        guessed=len(guessed),
    )


def _inside_fusion(site: loops.Site | None) -> bool:
    while site is not None:
        if site.caller.opcode == "fusion":
            return True
        site = site.outer
    return False


def _overlaps(target: Target, c: Collective) -> bool:
    return c.is_async or (target.chip.kind == "gpu" and target.compiler == "cpu" and c.cause in OVERLAPPED_ON_GPU)


def _collective(target: Target, devices: Sequence[Any], c: Collective) -> tuple[str, float]:
    found = way_of(target, devices, c)
    name = f"{found.link} {' x '.join(c.axes) or 'all'}"
    return name, found.seconds(c.bytes_at_least, c.op, c.group_size, c.trip_count or 1)


# ---- one instruction --------------------------------------------------------------------------------------------------


_KERNEL_COST = re.compile(r'"cost_estimate":\{"flops":"?(\d+)')
"""What a kernel says of itself, in the text of the program (`spmdkit/ops/kernel.py` writes it)."""
_FLOATS = ("bf16", "f16", "f32")


class _Costs:
    """FLOPs of products and bytes of main memory of each instruction, once."""

    def __init__(self, module: Module):
        self._module = module
        self._flops_of: dict[str, dict[tuple[str, int], float]] = {}
        self._reads_of: dict[str, dict[int, int]] = {}

    def flops(self, i: Instruction) -> dict[tuple[str, int], float]:
        """Returns (dtype, passes) -> FLOPs of the products of an instruction, those of a fusion inside it."""
        if i.opcode in ("dot", "convolution"):
            computation = self._module.computations[i.computation]
            operands = [computation.operand(i, n) for n in (0, 1)]
            if any(o is None for o in operands):
                return {}
            found = _dot(i, operands) if i.opcode == "dot" else _convolution(i, operands)
            return {(operands[0].shapes[0].dtype, _passes(i)): found}  # type: ignore[union-attr]
        if i.opcode == "fusion":
            return self._fused(i.called["calls"][0])
        if i.opcode == "custom-call" and (cost := _KERNEL_COST.search(i.attributes)):
            computation = self._module.computations[i.computation]
            made = [o for n in range(len(i.operands)) if (o := computation.operand(i, n)) is not None]
            dtypes = [o.shapes[0].dtype for o in made if o.shapes and o.shapes[0].dtype in _FLOATS]
            return {(dtypes[0] if dtypes else "f32", 1): float(cost[1])}
        return {}

    def _fused(self, name: str) -> dict[tuple[str, int], float]:
        if name not in self._flops_of:
            total: dict[tuple[str, int], float] = defaultdict(float)
            for inner in self._module.computations[name].instructions:
                for key, flops in self.flops(inner).items():
                    total[key] += flops
            self._flops_of[name] = dict(total)
        return self._flops_of[name]

    def bytes(self, i: Instruction) -> int:
        """Returns the bytes that an instruction moves between main memory and the chip."""
        computation = self._module.computations[i.computation]
        operands = [computation.operand(i, n) for n in range(len(i.operands))]
        written = _in_memory(i)
        if i.opcode in _SLICES:
            return 2 * written
        if i.opcode == "dynamic-update-slice":
            return 2 * _in_memory(operands[1]) if len(operands) > 1 and operands[1] is not None else written
        if i.opcode == "fusion":
            inner = self._module.computations[i.called["calls"][0]]
            reads = self._reads(inner)
            total = min(written, _update_bytes(inner, inner.root, written))
            for n, operand in enumerate(operands):
                if operand is not None:
                    total += min(_in_memory(operand), reads.get(n, 2**62))
            return total
        if i.opcode.endswith("-start"):  # (operand, result, context)
            return 2 * min((s.bytes for s in i.shapes[:2]), default=0)
        return written + sum(_in_memory(operand) for operand in operands if operand is not None)

    def _reads(self, fused: Computation) -> dict[int, int]:
        """Returns number of a parameter -> bytes read of it, for those of which only slices are read."""
        if fused.name not in self._reads_of:
            found: dict[int, int] = {}
            for i in fused.instructions:
                if i.opcode == "parameter" and (bytes_read := _slices_of(fused, i)) is not None:
                    found[int(i.text)] = bytes_read
            self._reads_of[fused.name] = found
        return self._reads_of[fused.name]


def _slices_of(fused: Computation, i: Instruction, depth: int = 0) -> int | None:
    """Returns the bytes of the slices through which alone an array is read in a fusion; None where it is read whole."""
    total = 0
    for user in fused.users[i.name]:
        if user.opcode in _SLICES and user.operands[0] == i.name:
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == i.name:
            update = fused.operand(user, 1)
            total += update.bytes if update is not None else user.bytes
        elif _is_same(user, i) and depth < 8:
            inner = _slices_of(fused, user, depth + 1)
            if inner is None:
                return None
            total += inner
        else:
            return None
    return total


def _update_bytes(fused: Computation, root: Instruction, whole: int) -> int:
    """Returns the bytes that a fusion writes: of an update in place, the update; of several results, each one's."""
    if root.opcode == "tuple":
        results = [fused.operand(root, n) for n in range(len(root.operands))]
        return sum(_update_bytes(fused, result, _in_memory(result)) for result in results if result is not None)
    while root.opcode in ("bitcast", "reshape") and (source := fused.operand(root)) is not None:
        root = source
    if root.opcode == "dynamic-update-slice" and (update := fused.operand(root, 1)) is not None:
        return update.bytes
    return whole


def _is_same(user: Instruction, of: Instruction) -> bool:
    """Returns whether an operation in a fusion only gives an array another form (an inner fusion of one array: a bitcast for the compiler's tiles)."""
    if user.opcode == "fusion":
        return len(user.operands) == 1 and len(user.shapes) == 1 and user.bytes == of.bytes
    return user.opcode in ("bitcast", "reshape")


def _in_memory(i: Instruction | None) -> int:
    """Returns the bytes of a result in the device's main memory (on TPU, space 1 is on the chip)."""
    return 0 if i is None else sum(s.padded_bytes for s in i.shapes if s.space == 0)


def _dot(i: Instruction, operands: Sequence[Any]) -> float:
    lhs = operands[0].shapes[0].dims
    contracted = [int(n) for n in (i.attribute("lhs_contracting_dims") or "").split(",") if n]
    return 2.0 * i.shapes[0].size * math.prod(lhs[n] for n in contracted)


def _passes(i: Instruction) -> int:
    """Returns how many bfloat16 passes a TPU makes of a product: six at the highest precision, three at a high one."""
    found = re.search(r"operand_precision=\{(\w+),(\w+)\}", i.attributes)
    return {"highest": 6, "high": 3}.get(found[1], 1) if found else 1


def _convolution(i: Instruction, operands: Sequence[Any]) -> float:
    """Returns 2 x multiply-adds of a convolution; the TPU compiler writes every product as one."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        return 0.0
    lhs, rhs, out = operands[0].shapes[0].dims, operands[1].shapes[0].dims, i.shapes[0].dims
    window = _window(i)
    pairs = 1.0
    spatial = [c for c in labels[3] if c.isdigit()]
    for c in spatial:
        n = int(c)
        pairs *= valid_pairs(
            size=lhs[labels[1].index(c)],
            window=rhs[labels[2].index(c)],
            out=out[labels[3].index(c)],
            stride=window.get("stride", {}).get(n, 1),
            low=window.get("pad", {}).get(n, 0),
            lhs_dilation=window.get("lhs_dilate", {}).get(n, 1),
            rhs_dilation=window.get("rhs_dilate", {}).get(n, 1),
        )
    outer = math.prod(n for n, c in zip(out, labels[3], strict=True) if not c.isdigit())
    return 2.0 * outer * rhs[labels[2].index("i")] * pairs


def _window(i: Instruction) -> dict[str, dict[int, int]]:
    """Returns `pad`, `stride`, `lhs_dilate`, `rhs_dilate` -> dim -> number (of a padding: the low side)."""
    text = re.search(r"window=\{([^}]*)\}", i.attributes)
    found: dict[str, dict[int, int]] = {}
    for key, value in re.findall(r"(\w+)=([\w\-]+)", text[1] if text else ""):
        found[key] = {n: int(part.split("_")[0]) for n, part in enumerate(value.split("x"))}
    return found
