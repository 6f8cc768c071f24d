"""`axis-crosses-slow-links`: a model axis spans several hosts (GPU) or slices (TPU), though it would fit inside one.

Bandwidth between hosts and slices is about a tenth of that inside. A replica axis has to cross once per step, with the
gradient alone. Gathers of ZeRO 3 or sums of tensor parallelism cross in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spmdkit.foundation.formatting import format_bytes
from spmdkit.mesh.mesh import MODEL_AXES
from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.machine.links import crossing_axes, link_path_of


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each model axis that crosses hosts or slices and has a size divisible by their number."""
    target = step.target
    if target is None or target.num_slices < 2:
        return
    mesh, parts, sizes = step.program.mesh, target.num_slices, step.program.sizes
    devices, crossing = list(mesh.devices.flat), set(MODEL_AXES) & crossing_axes(target, mesh)
    rows_of: dict[str, list[Collective]] = {}
    for c in step.bill.rows:
        if step.is_significant(c) and link_path_of(target, devices, c).crosses:
            for axis in (axis for axis in c.axes if axis in crossing):
                rows_of.setdefault(axis, []).append(c)
    for axis, rows in rows_of.items():
        around = sizes["replica"] * sizes["data"]
        if around % parts == 0:  # only replicas need to cross; the device order prevents it
            repaired = _mesh({**sizes, "replica": parts, "data": around // parts})
            fix = f"Reorder the mesh so that replica ({parts}) is the axis between hosts or slices: {repaired}."
        elif sizes[axis] % parts == 0:
            repaired = _mesh({**sizes, "replica": parts * sizes["replica"], axis: sizes[axis] // parts})
            fix = f"{repaired}, if it fits: only the gradient crosses then."
        else:
            continue
        sent = sum(c.bytes_at_least for c in rows)
        kind = "hosts" if target.chip.kind == "gpu" else "slices"
        yield Finding(
            "axis-crosses-slow-links",
            (
                f"{axis} ({sizes[axis]}) spans {kind}: {format_bytes(sent)} a step and device over "
                f"{target.chip.outer.name}, {target.chip.outer.bytes_per_s / 1e9:.3g} GB/s instead of "
                f"{target.chip.inner.bytes_per_s / 1e9:.3g}"
            ),
            step.config_line(f"mesh.{axis}") or max(rows, key=lambda c: c.bytes_at_least).source,
            fix,
        )


def _mesh(sizes: Mapping[str, int]) -> str:
    """Returns the setting of a mesh."""
    return f"mesh: {{{', '.join(f'{axis}: {n}' for axis, n in sizes.items() if n > 1)}}}"
