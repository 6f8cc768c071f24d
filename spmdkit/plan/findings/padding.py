"""`padding-waste`: an array takes several times its bytes, since a TPU stores the two minor dims in full tiles.

A tile is 8 x 128 of 32 bits (16 x 128 of bfloat16): f32[8192, 4, 2] takes 128 times the bytes of its elements,
f32[2, 4, 8192] takes no padding. Only large arrays in the device's main memory are checked.

Source: "How to Scale Your Model", chapter on TPUs (vector registers of 8 x 128, padding of small dims).
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.source import source_of

MIN_BYTES = 2**24
MIN_FACTOR = 2.0
MAX_FINDINGS = 3
_NO_BUFFER = ("get-tuple-element", "tuple", "bitcast", "while", "constant")


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields the arrays with the most padding, one for each line."""
    module = step.module
    least = max(MIN_BYTES, step.memory.peak_bytes // 50)
    findings: dict[str | None, tuple[int, Finding]] = {}
    for i in module.unfused():
        if i.opcode in _NO_BUFFER or (i.opcode == "parameter" and i.computation != module.entry.name):
            continue
        for shape in i.shapes:
            waste = shape.padded_bytes - shape.bytes
            if shape.space or waste < least or shape.padded_bytes < MIN_FACTOR * shape.bytes:
                continue
            source = source_of(module, i)
            finding = Finding(
                "padding-waste",
                (
                    f"{shape} holds {format_bytes(shape.bytes)} and takes {format_bytes(shape.padded_bytes)} of each "
                    "device: its minor dims are padded to full tiles"
                ),
                source,
                (
                    "Put a long dim last (a multiple of 128) and one of at least 8 before it: transpose, or merge "
                    "small dims into one."
                ),
            )
            if source not in findings or findings[source][0] < waste:
                findings[source] = waste, finding
    worst = sorted(findings.values(), key=lambda item: -item[0])[:MAX_FINDINGS]
    yield from (finding for _, finding in worst)
