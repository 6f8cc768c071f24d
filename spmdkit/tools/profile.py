"""`spmdkit profile RUN`: a profiler trace of a run as text: the top operations with their lines, the share of
collectives, and the communication that no computation overlaps.

The trace is read by `jax.profiler.ProfileData`. The lines come from the compiled programs that the run has written next
to the trace. All shares are of the time between the first and the last operation of a device, a mean over devices. On a
CPU a collective includes the time in which it waits for the other devices.
"""

from __future__ import annotations

import contextlib
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_seconds, new_table, shown_source
from spmdkit.plan.hlo.collectives import OPCODES
from spmdkit.plan.hlo.source import source_of
from spmdkit.plan.hlo.text import Instruction, Module, parse

COLLECTIVES = tuple(name.replace("-", "_") for name in OPCODES)
CONTROL = ("while", "conditional", "call")
"""Operations that only contain other operations, which are counted themselves."""

Intervals = list[tuple[float, float]]
Keys = Set[tuple[str, str]]
"""Names of a program and of its instruction."""


class Operation(NamedTuple):
    """One execution of an operation on a device, in nanoseconds."""

    device: str
    module: str
    name: str
    start: float
    end: float


def summarize(run_dir: Path, num_top: int = 15) -> dict[str, Any]:
    """Returns `trace`, `devices`, `steps` (those in the trace), `step_s`, `collectives`, `exposed` and `idle` (shares
    of the step) and `operations` (the top ones: `name`, `source`, `collective`, `calls` and `seconds` per device and
    step, `share` of the time of all operations).

    Raises:
        ConfigError: the run has no trace, or the trace has no operation of a device.
    """
    traces = sorted((run_dir / "profile").glob("plugins/profile/*/*.xplane.pb"))
    if not traces:
        raise ConfigError(
            f"profile {run_dir}: no trace in its folder 'profile'. A run writes one if its config requests it. Train "
            "with profile: {steps: [10, 12]}."
        )
    folder = traces[-1].parent
    operations, steps = read_trace(path for path in traces if path.parent == folder)
    if not operations:
        raise ConfigError(
            f"profile {run_dir}: {folder} has no operation of a device. A trace has those of all steps that ran in it. "
            "Train again with profile.steps in a new run_dir."
        )
    of_device = defaultdict[str, list[Operation]](list)
    for operation in operations:
        of_device[operation.device].append(operation)
    num_steps, num_devices = max(len(steps), 1), len(of_device)
    modules = _modules(run_dir / "profile")
    communicating = {(name, i.name) for name, m in modules.items() for i in m.instructions() if _communicates(m, i)}
    shares = [_shares(each, communicating) for each in of_device.values()]
    span, collectives, exposed, idle = (sum(column) / num_devices for column in zip(*shares, strict=True))
    return {
        "trace": str(folder),
        "devices": num_devices,
        "steps": sorted(steps),
        "step_s": span / num_steps * 1e-9,
        "collectives": collectives / span,
        "exposed": exposed / span,
        "idle": idle / span,
        "operations": _top(operations, modules, communicating, num_top, num_devices * num_steps),
    }


def read_trace(paths: Iterable[Path]) -> tuple[list[Operation], set[int]]:
    """Returns the operations on all devices without control flow, and the numbers of the marked steps."""
    from jax.profiler import ProfileData

    operations, steps = list[Operation](), set[int]()
    for path in paths:
        for plane in ProfileData.from_file(str(path)).planes:
            is_device = plane.name.startswith("/device:")
            for line in plane.lines:
                of_ops = is_device and line.name in ("XLA Ops", "Async XLA Ops")  # of a TPU
                for event in line.events:
                    stats = dict(event.stats)
                    if event.name == "train" and "step_num" in stats:
                        steps.add(int(str(stats["step_num"])))
                    name = str(stats.get("hlo_op") or (event.name.partition(" = ")[0].lstrip("%") if of_ops else ""))
                    if name and not name.startswith(CONTROL):
                        number = plane.name if is_device else stats.get("device_ordinal", 0)
                        device = f"{path.stem} {number}"  # each process counts its devices from 0
                        end = event.start_ns + event.duration_ns
                        module = str(stats.get("hlo_module", ""))
                        operations.append(Operation(device, module, name, event.start_ns, end))
    return operations, steps


def _communicates(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction is a collective or a fusion with one."""
    inside = (i for name in instruction.calls for i in module.computations[name].instructions)
    opcodes = (i.opcode.removesuffix("-start").removesuffix("-done") for i in (instruction, *inside))
    return any(opcode in OPCODES for opcode in opcodes)


def _is_collective(operation: Operation, communicating: Keys) -> bool:
    """By the program, or without its text by the name: `all-reduce-start.3`, `reduce_scatter.96`."""
    return operation[1:3] in communicating or operation.name.replace("-", "_").startswith(COLLECTIVES)


def _shares(operations: list[Operation], communicating: Keys) -> tuple[float, float, float, float]:
    """Returns the time of a device, in collectives, in collectives alone, and in no operation, in nanoseconds."""
    of_kind: dict[bool, Intervals] = {True: [], False: []}
    for operation in operations:
        of_kind[_is_collective(operation, communicating)].append((operation.start, operation.end))
    span = max(o.end for o in operations) - min(o.start for o in operations)
    collectives, computing = _length(of_kind[True]), _length(of_kind[False])
    busy = _length(of_kind[True] + of_kind[False])
    return span, collectives, busy - computing, span - busy


def _length(intervals: Intervals) -> float:
    """Returns the length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return length


def _modules(folder: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(folder.glob("*.hlo.gz")):
        with contextlib.suppress(OSError, EOFError, UnicodeDecodeError), gzip.open(path, "rt") as file:
            text = file.read()
            modules[text.partition(",")[0].removeprefix("HloModule ").strip()] = parse(text)
    return modules


def _top(
    operations: list[Operation], modules: Mapping[str, Module], communicating: Keys, num: int, runs: int
) -> list[dict[str, Any]]:
    seconds, calls = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], int](int)
    collective = {o[1:3] for o in operations if _is_collective(o, communicating)}
    for operation in operations:
        seconds[operation[1:3]] += (operation.end - operation.start) * 1e-9
        calls[operation[1:3]] += 1
    instructions = {(name, i.name): (m, i) for name, m in modules.items() for i in m.instructions()}
    total = sum(seconds.values())
    return [
        {
            "name": key[1],
            "source": source_of(*instructions[key]) if key in instructions else None,
            "collective": key in collective,
            "calls": calls[key] / runs,
            "seconds": seconds[key] / runs,
            "share": seconds[key] / total if total else 0.0,
        }
        for key in sorted(seconds, key=lambda key: -seconds[key])[:num]
    ]


def lines_of(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a summary."""
    steps, devices = summary["steps"], summary["devices"]
    marked = f"steps {steps[0]} to {steps[-1]}" if steps else "no marked step"
    yield f"{summary['trace']}: {marked}, {devices} device{'s' * (devices != 1)}"
    shares = ("collectives", "exposed communication", "idle")
    values = (summary["collectives"], summary["exposed"], summary["idle"])
    shown = "  ".join(f"{name} {value:.0%}" for name, value in zip(shares, values, strict=True))
    yield f"{format_seconds(summary['step_s'])} per step  {shown}"


def print_summary(summary: Mapping[str, Any]) -> None:
    """Prints a summary: two lines, and a table of the top operations per device and step."""
    from rich.console import Console

    print(*lines_of(summary), "", sep="\n")
    table = new_table("time", "share", "calls", "operation", "line", right=range(3))
    for row in summary["operations"]:
        time, calls = format_seconds(row["seconds"]), f"{row['calls']:.3g}"
        table.add_row(time, f"{row['share']:.0%}", calls, row["name"], shown_source(row["source"]))
    Console(highlight=False, soft_wrap=True, markup=False).print(table)
