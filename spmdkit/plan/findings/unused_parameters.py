"""`unused-parameter`: the loss does not depend on a parameter, which takes memory and time in every step.

Read from the jaxpr: removing what the loss does not need also removes the parameter. Not reported for a user-defined
`train_step`, which may have losses that it does not return.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit import compat
from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.trees import named_leaves
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields at most one finding, with the largest of the parameters."""
    program, task = step.program, getattr(step.program, "task", None)
    if task is None or task.train_step is not None:
        return
    outputs = [path.split("/") for path, _ in named_leaves(program.traced.out_info)]
    wanted = [path == ["1", "loss"] for path in outputs]  # of (state, metrics)
    if not any(wanted):
        return
    leaves = zip(program.layout, compat.used_inputs(step.jaxpr, wanted), strict=False)
    unused = [leaf for leaf, is_used in leaves if leaf.path.startswith("params") and not is_used and leaf.num_bytes]
    if not unused:
        return
    largest = max(unused, key=lambda leaf: leaf.num_bytes)
    more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    code = getattr(task.init, "__code__", None)
    yield Finding(
        "unused-parameter",
        (
            f"the loss does not depend on {largest.path}{more} ({format_bytes(sum(x.num_bytes for x in unused))}): the "
            "gradient is zero, and the optimizer stores and updates it"
        ),
        f"{code.co_filename}:{code.co_firstlineno}" if code else None,
        f"Use {largest.path.removeprefix('params/')} in the loss, or do not create it in init.",
    )
