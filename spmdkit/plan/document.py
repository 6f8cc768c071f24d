"""`plan_program`: everything known about a step before it runs, as one JSON object, the source of every form of a plan.

`spmdkit plan --json` prints the object and `plan.json` in a run directory stores it. The table, the page and the
comparison read only this object. All bytes and FLOPs are per device and step. Keys:

    target, compiler, notes           the machine, the compiler of the program, limits of the plan's accuracy
    num_devices, mesh, form           axis -> size (all axes), how the step is compiled
    attention                         the tiles of attention on TPUs
    rows                              how rows enter the loss, each metric and each leaf of the model state
    fits, memory                      argument_bytes, temp_bytes, peak_bytes, limit_bytes, parts, host_parts, live
    collectives                       one row for each kind, most bytes first; phase, every, until: if a run calls
                                      several programs
    collective_bytes                  their sum for the step
    wire                              by_axes, by_cause: bytes per step; on_average, at_most: including the programs
                                      that run after some steps
    flops, model_flops                of matrix products: in the compiled program, and a device's share of the model's
                                      work, without repeated work and recomputation (MFU uses the latter)
    flops_by_dtype, elementwise_flops a device's share of the step, from its jaxpr
    predicted_step_s, time            parts, links, bound, mfu, examples_per_s, tokens_per_s, calibrated, error_bar
    lines                             source, text, seconds, exposed_s, parts, flops: what each line takes of a step
    timeline                          title, source, iterations, seconds, rows, spans: one iteration of the longest loop
    findings                          severity, code, message, source, fix
    layout                            path, shape, dtype, spec, memory_kind, bytes (global), device_bytes, reason
    budget                            limits of the config, and the exceeded ones
    config                            the resolved config, YAML
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmdkit.config import to_yaml
from spmdkit.foundation.formatting import format_bytes, shown, shown_axes, shown_source
from spmdkit.plan.budget import exceeded
from spmdkit.plan.collectives_bill import Bill, Collective
from spmdkit.plan.compiled_step import CompiledStep, read_compiled, read_program
from spmdkit.plan.error_bars import error_bar
from spmdkit.plan.findings import Finding
from spmdkit.plan.flops import Arithmetic, count
from spmdkit.plan.hlo.source import source_of, text_of
from spmdkit.plan.jaxpr_lines import paths
from spmdkit.plan.lower_bound import lower_bound_bytes
from spmdkit.plan.machine.links import link_path_of, parts_of
from spmdkit.plan.machine.target import Target
from spmdkit.plan.memory import memory_without_program
from spmdkit.plan.step_time import Time
from spmdkit.program.memory import shard_bytes
from spmdkit.program.program import Program

Document = dict[str, Any]
VERSION = 1
MAX_SPANS = 1000
_MEMORY = ("argument", "output", "alias", "temp", "code", "peak")
_DOES_NOT_FIT = (
    "More microbatches, remat: full, a larger fsdp or tensor axis, or offload: [optimizer]; --search tries them."
)


def plan_program(program: Program, target: Target, call_s: float = 0.0) -> Document:
    """Returns the plan of a program on the target of its devices. Compiles the program if necessary.

    A program that the compiler rejects for lack of memory also has a plan; it shows by how much the limit is exceeded.
    """
    arithmetic = count(program.traced.jaxpr)
    model = count(program.traced_once().jaxpr) if program.computes_twice else arithmetic
    needed = program.step_bytes
    analysis = None if needed.refused else read_program(program, target, call_s)
    memory = memory_without_program(program) if analysis is None else analysis.memory
    findings = [] if analysis is None else [*analysis.findings]
    limit, chip = target.memory_limit_bytes, target.chip
    # The compiler can reject a v4 step that exceeds the memory of one core, half of the chip's.
    fits = memory.peak_bytes <= limit and (analysis is not None or needed.temp_bytes > 0)
    if not fits:
        message = f"a step needs {format_bytes(memory.peak_bytes)} of a device, {chip.name} has {format_bytes(limit)}"
        findings.insert(0, Finding("does-not-fit", message, None, _DOES_NOT_FIT, severity="error"))
    document = _head(program, target) | {
        "fits": fits,
        "memory": {
            **{f"{name}_bytes": getattr(memory, f"{name}_bytes") for name in _MEMORY},
            "limit_bytes": limit,
            "host_bytes": memory.host_bytes,
            "parts": dict(memory.parts),
            "host_parts": dict(memory.host_parts),
            "live": [vars(buffer) for buffer in memory.live],
        },
        "findings": [vars(finding) for finding in findings],
        **_sent(program, target, analysis),
        **_computed(program, target, arithmetic, model, analysis),
        "layout": layout_rows(program),
        "config": to_yaml(program.config, hide_secrets=True),
        "source": str(program.config.source) if program.config.source else None,
    }
    budget = program.config.budget
    document["budget"] = {
        "allowed": {} if budget is None else budget.model_dump(exclude_none=True),
        "exceeded": exceeded(budget, document),
    }
    return document


def _sent(program: Program, target: Target, analysis: CompiledStep | None) -> Document:
    """Returns the collectives and their sums; both are unknown without a compiled program."""
    of_phases = [] if analysis is None else phases(program, analysis)
    bill = Bill((), program.sizes) if analysis is None else analysis.bill
    devices = list(program.mesh.devices.flat)
    rows = [(row, phase) for phase, of_phase in of_phases for row in of_phase.rows]

    def on_link(row: Collective) -> Document:
        path = link_path_of(target, devices, row)
        seconds = path.seconds(row.bytes_at_least, row.op, row.group_size, (row.trip_count or 1) * row.count)
        return {"link": path.link, "crosses": path.crosses, "seconds": seconds, "async": row.is_async}

    wire = {
        "by_axes": {shown_axes(axes) or "all": num for axes, num in bill.by("axes").items()},
        "by_cause": bill.by("cause"),
        "least": lower_bound_bytes(program),
    }
    return {
        "collectives": [row.as_json() | on_link(row) | phase for row, phase in rows],
        "collective_bytes": None if analysis is None else bill.bytes,
        "collective_bytes_at_least": bill.bytes_at_least,
        "collectives_in_loops": sum(c.count for c in bill.collectives if c.in_loop),
        "wire": wire | (over_a_run(program, of_phases) if of_phases else {}),
    }


def phases(program: Program, analysis: CompiledStep) -> list[tuple[Document, Bill]]:
    """Returns (phase, bill) of each program that a run calls; a single program has no phase.

    A phase has a name, `every` (the steps from one call to the next) and, for a program that replaces the step at the
    start, `until` (its last step).
    """
    others = list[tuple[Document, Bill]]()
    for phase in program.phases:
        until = {} if phase.until is None else {"until": phase.until}
        scans = analysis.scans if phase.in_place else {}
        of_phase = {"phase": phase.name, "every": phase.every} | until
        others.append((of_phase, read_compiled(program, phase.compiled, scans).bill))
    return [({"phase": "step", "every": 1}, analysis.bill), *others] if others else [({}, analysis.bill)]


def over_a_run(program: Program, of_phases: Sequence[tuple[Document, Bill]]) -> Document:
    """Returns the bytes that a device sends per step, including the programs that run after some steps: on average, and
    the maximum of one step; {} without such programs.

    Programs at the start of a run are excluded: the average is that of a long run.
    """
    lasting = [phase for phase in program.phases if phase.until is None]
    if not lasting:
        return {}
    sent = {phase["phase"]: bill.bytes_at_least for phase, bill in of_phases}
    more = {p.name: sent[p.name] - (sent["step"] if p.in_place else 0) for p in lasting}  # in addition to the step
    begun, longest = max(phase.first for phase in lasting), math.lcm(*(phase.every for phase in lasting))
    steps = range(begun, begun + min(longest, 100_000))
    return {
        "on_average": sent["step"] + sum(more[phase.name] / phase.every for phase in lasting),
        "at_most": sent["step"] + max(sum(more[p.name] for p in lasting if p.runs(step)) for step in steps),
    }


def _head(program: Program, target: Target) -> Document:
    return {
        "version": VERSION,
        "target": target.name,
        "chip": target.chip.name,
        "compiler": target.compiler,
        "notes": [*target.notes, *program.notes],
        "num_devices": int(program.mesh.devices.size),
        "hosts_or_slices": target.num_slices,
        "mesh": {shown(axis): size for axis, size in program.sizes.items()},
        "form": program.form,
        "attention": [f"splash attention, {tiles}" for tiles in sorted(program._step_context.usage.tiles)],
        "rows": [vars(row) for row in program.row_table],
        "batch_size": program.config.largest_batch,
        "microbatches": program.config.microbatches,
        "places": places(program, target),
    }


def _computed(
    program: Program,
    target: Target,
    arithmetic: Arithmetic,
    model: Arithmetic,
    analysis: CompiledStep | None,
) -> Document:
    """Returns the FLOPs and the time of one device. Without a program, or without products in it, the FLOPs are a
    device's share of the step."""
    devices = list(program.mesh.devices.flat)
    num = len(devices)
    fields = {
        "num_params": sum(x.size for x in jax.tree.leaves(program.abstract_state.params)),
        "flops": arithmetic.flops / num,
        "model_flops": model.flops / num,
        "flops_by_dtype": {dtype: flops / num for dtype, flops in arithmetic.by_dtype.items()},
        "elementwise_flops": arithmetic.elementwise / num,
    }
    if analysis is None or (time := analysis.time) is None:
        return fields | {"predicted_step_s": None, "time": None, "lines": [], "timeline": None}
    step_s = max(time.step_s, 1e-9)
    tokens = tokens_of_batch(program)
    dtype = max(model.by_dtype, key=lambda d: model.by_dtype[d], default="float32")
    peak = max(target.chip.peak(dtype), target.chip.peak("float32"))  # a CPU multiplies bfloat16 as float32
    return fields | {
        "flops": time.hlo_flops or fields["flops"],
        "predicted_step_s": step_s,
        "time": {
            "parts": time.parts(),
            "links": {name: vars(link) for name, link in time.links.items()},
            "bound": time.bound,
            "mfu": model.products / num / (step_s * peak),
            "peak_flops_per_s": peak,
            "examples_per_s": program.config.largest_batch / step_s,
            "tokens_per_s": tokens / step_s if tokens else None,
            "hlo_flops": time.hlo_flops,
            "memory_traffic_bytes": time.memory_bytes,
            "loops_of_unknown_length": time.guessed,
            "calibrated": target.calibrated,
            "error_bar": None if (bar := error_bar(target)) is None else vars(bar),
        },
        "lines": line_rows(time),
        "timeline": timeline_of(analysis, time),
    }


def line_rows(time: Time) -> list[Document]:
    """Returns what each line takes of a step, the longest first. `seconds` and `exposed_s` of all rows, and the bubble
    of a pipeline, sum to the time of the step."""
    return [
        {
            "source": source,
            "text": text_of(source),
            "seconds": sum(line.seconds.values()),
            "exposed_s": line.exposed_s,
            "parts": dict(line.seconds),
            "flops": line.flops,
        }
        for source, line in time.lines.items()
        if line.total_s > 0
    ]


def timeline_of(analysis: CompiledStep, time: Time) -> Document:
    """Returns one iteration of the loop that takes most of the step, or the step if no loop does: what each row does,
    and when. The longest `MAX_SPANS` are listed."""
    loop, body = time.layer, time.whole if time.layer is None else time.layer.body
    spans = sorted(body.spans(), key=lambda span: span.start_s - span.end_s)
    rows = dict.fromkeys(["compute", *(span.row for span in spans)])
    source = loop and source_of(analysis.module, loop.instruction)
    return {
        "title": f"One of {loop.iterations} iterations of the loop at {shown_source(source)}" if loop else "The step",
        "source": source,
        "iterations": loop.iterations if loop else 1,
        "seconds": body.now_s,
        "rows": [*rows],
        "spans": [span._asdict() for span in sorted(spans[:MAX_SPANS], key=lambda span: span.start_s)],
        "omitted": max(0, len(spans) - MAX_SPANS),
    }


def tokens_of_batch(program: Program) -> int | None:
    """Returns the tokens of a global batch: by `Task.tokens`, or the size of the largest integer leaf
    [batch, positions]; None for a task without one. A leaf of T + 1 positions of which the step reads the first T and
    the last T has T."""
    if declared := program.num_tokens(program.abstract_batch):
        return declared
    leaves = jax.tree.leaves(program.abstract_batch.examples)
    arrays = [x.shape for x in leaves if len(x.shape) == 2 and x.dtype.kind in "iu" and x.shape[1] > 1]
    if not arrays:
        return None
    rows, positions = max(arrays, key=math.prod)
    ranges = {
        (eqn.params["start_indices"][-1], eqn.params["limit_indices"][-1])
        for eqn, _ in paths(program.traced.jaxpr, program.traced.fun_name)
        if eqn.primitive.name == "slice" and eqn.invars[0].aval.shape[-1:] == (positions,)
        if eqn.invars[0].aval.dtype.kind in "iu"
    }
    shifted = {(0, positions - 1), (1, positions)} <= ranges
    return int(rows * (positions - shifted))


def layout_rows(program: Program) -> list[Document]:
    """Returns the placement of every leaf of the train state: global shape and bytes, bytes per device, and reason."""
    return [
        {
            "path": leaf.path,
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "spec": [[shown(a) for a in d] if isinstance(d, tuple) else d and shown(d) for d in leaf.spec],
            "memory_kind": leaf.memory_kind,
            "bytes": leaf.num_bytes,
            "device_bytes": shard_bytes(leaf.shape, leaf.dtype, leaf.sharding(program.mesh)),
            "reason": leaf.reason,
        }
        for leaf in program.layout
    ]


def places(program: Program, target: Target, most: int = 1024) -> list[dict[str, Any]]:
    """Returns the position of each of the first devices of the mesh, for drawing: chip coordinates, host or slice."""
    rows, devices = [], list(program.mesh.devices.flat)[:most]
    for device, part in zip(devices, parts_of(target, devices), strict=True):
        coords: Sequence[int] = tuple(getattr(device, "coords", ()) or ()) if target.compiler == "tpu" else ()
        rows.append({"id": int(device.id), "coords": list(coords), "part": part})
    return rows


def problem_of(document: Mapping[str, Any]) -> str:
    """Returns why a plan must not be run (it does not fit, or exceeds the config's budget); empty if it may be run."""
    problems = list(document["budget"]["exceeded"])
    if not document["fits"]:
        needed, limit = (format_bytes(document["memory"][name]) for name in ("peak_bytes", "limit_bytes"))
        problems.insert(0, f"a step needs {needed} of each device, {document['target']} has {limit}")
    return "; ".join(problems)
