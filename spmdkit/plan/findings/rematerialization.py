"""`full-rematerialization`: XLA gathers the full array on every device, since it cannot convert between two shardings.

XLA reports this only in a log line ("Involuntary full rematerialization"), which is read if this process compiled the
step. In the program it is an all_gather of which each device reads one part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.readers import only_parts_read
from spmdkit.plan.hlo.source import line_of
from spmdkit.plan.hlo.text import Frame, Shape
from spmdkit.plan.jaxpr_lines import lines_of

MIN_BYTES = 2**16
_FIX = (
    "Shard the array in between with sk.shard(x, ...), with one dim unsharded, or shard the producer and the "
    "consumer along the same dim."
)


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields a finding for each array that the log names, and for each gather with a result that is read in parts."""
    seen: set[str | None] = set()
    for line in step.program.compile_log:
        array = re.search(r"%?([\w.\-]+) = (\w+)\[([\d,]*)\]", line)
        name = re.search(r'op_name="([^"]*)"', line)
        source = _source(step, line, name[1] if name else "")
        size = 0
        if array is not None:
            size = _global_size(array, line)
        if source in seen or (array is not None and size < MIN_BYTES):
            continue
        seen.add(source)
        shardings = re.search(r"from sharding (\{.*?\}) to (\{.*?\})", line)
        ways = f", from {shardings[1]} to {shardings[2]}" if shardings else ""
        what = f"an array of {format_bytes(size)}" if array else "an array"
        yield Finding(
            "full-rematerialization",
            (
                f"{what} is replicated on every device to be sharded in another way (the partitioner's involuntary "
                f"rematerialization{ways})"
            ),
            source,
            _FIX,
        )
    for c in step.bill.collectives:
        if c.op != "all_gather" or c.source in seen or not step.is_significant(c):
            continue
        gather = next(i for i in step.module.instructions() if i.name == c.names[0])
        if only_parts_read(step.module, gather, c.group_size):
            seen.add(c.source)
            yield Finding(
                "full-rematerialization",
                (
                    f"{', '.join(map(str, c.shapes[:1]))} is gathered over {shown_axes(c.axes)} "
                    f"({format_bytes(c.size)}), and each device reads one part in {c.group_size} of it"
                ),
                c.source,
                _FIX,
            )


def _source(step: CompiledStep, line: str, op_name: str) -> str | None:
    """Returns the user's line for a log line, from the line's metadata or from the jaxpr equation with the same name.

    Several equations can have one name; the log's stack frame then decides, if the compiled program's table has it.
    """
    if match := re.search(r'source_file="([^"]*)" source_line=(\d+)', line):
        return line_of((Frame(match[1], int(match[2]), ""),))
    candidates = lines_of(step.jaxpr, step.program.traced.fun_name, op_name)
    match = re.search(r"stack_frame_id=(\d+)", line)
    framed = line_of(step.module.stacks.get(int(match[1]), ())) if match else None
    return framed if framed in candidates else next(iter(candidates), framed)


def _global_size(array: re.Match[str], line: str) -> int:
    """Returns the bytes of the global array: the log shows the shape on one device, and the sharding."""
    size = Shape(array[2], tuple(int(n) for n in array[3].split(",") if n)).bytes
    cut = re.search(r"from sharding \{devices=\[([\d,]+)\]", line)
    tiles = [int(n) for n in cut[1].split(",")] if cut else []
    return size * math.prod(tiles[: len(array[3].split(","))])
