"""`donation-not-used`: a leaf of the state is donated, but the new leaf still gets a separate buffer.

The step then holds the leaf twice. This happens if a leaf is written but never read (the compiler drops the argument
and has no buffer to reuse), or if the new leaf has another layout than the old one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.source import source_of
from spmdkit.program.memory import shard_bytes

MIN_BYTES = 2**16


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each field of the state with leaves that are stored twice on a device."""
    module, program = step.module, step.program
    reused = {int(n) for n in re.findall(r"\{(\d+)\}: \(\d+,", module.header)}
    root = module.entry.root
    twice: dict[str, list[tuple[str, int, str | None]]] = {}
    for number, leaf in enumerate(program.layout):
        if number in reused or leaf.memory_kind != "device":
            continue
        size = shard_bytes(leaf.shape, leaf.dtype, leaf.sharding(program.mesh))
        made = module.entry.operand(root, number) if root.opcode == "tuple" else root
        if size >= MIN_BYTES:
            source = None if made is None else source_of(module, made)
            twice.setdefault(leaf.path.split("/")[0], []).append((leaf.path, size, source))
    for leaves in twice.values():
        total = sum(size for _, size, _ in leaves)
        yield Finding(
            "donation-not-used",
            (
                f"{leaves[0][0]}{f' and {len(leaves) - 1} more' if len(leaves) > 1 else ''} ({format_bytes(total)} of "
                "each device) lie there twice during a step: the old array is not reused for the new one"
            ),
            leaves[0][2],
            "Read the old leaf in the step, or leave out of the state what is never read.",
        )
