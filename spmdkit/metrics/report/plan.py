"""A plan as one self-contained page: memory, communication, time, the mesh with its groups, every leaf, every finding.

Uses only the plan's JSON. The page loads and executes nothing; every text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import (
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
    shown_source,
)
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.report.drawing import draw_groups
from spmdkit.metrics.report.page import (
    KEEP,
    NUM_COLORS,
    NUMBER,
    WIDE,
    cards,
    code,
    heading,
    page,
    paragraph,
    section,
    table,
)

MAX_LEAVES = 2000
LEAST = 1e-4
"""Share of the step that is shown."""
SPANS = {
    "run": ("c0", "instruction"),
    "loop": ("c7", "inner loop"),
    "wait": ("c1 hollow", "exposed: waits for a transfer"),
    "transfer": ("c2", "transfer"),
}
"""Kind of span -> (its classes in the style sheet, text of the legend)."""


def plan_page(document: Mapping[str, Any]) -> str:
    """Returns the complete HTML document."""
    name = f"plan of {Path(document['source']).stem}" if document.get("source") else "plan"
    has_time = bool(document["time"])
    parts = [
        _heading(name, document),
        _cards(document),
        _findings(document),
        section("Memory per device", _memory(document)),
        section("Predicted step time", _time(document)),
        section("Time by line", _lines(document)) if has_time and document.get("lines") else "",
        section(_timeline_title(document), _timeline(document)) if has_time and document.get("timeline") else "",
        section("Communication", _wire(document)),
        section("Mesh", _meshes(document)),
        section(f"Layout of {counted(len(document['layout']), 'leaf', 'leaves')}", _layout(document)),
        section("Candidates", _candidates(document["candidates"])) if document.get("candidates") else "",
        section("Config", f"<pre>{escape(document['config'])}</pre>") if document["config"] else "",
    ]
    return page(f"{name}, {document['target']}", parts, "spmdkit plan")


def _heading(name: str, document: Mapping[str, Any]) -> str:
    pills = [("good", "fits") if document["fits"] else ("bad", "does not fit")]
    pills += [("bad", "over budget")] if document["budget"]["exceeded"] else []
    facts = [
        *(document["target"], counted(document["num_devices"], "device"), describe_mesh(document["mesh"])),
        *(f"{format_count(document['num_params'])} parameters", f"batch {document['batch_size']}"),
    ]
    return heading(name, pills, facts) + "".join(map(paragraph, document["notes"]))


def _cards(document: Mapping[str, Any]) -> str:
    time, memory = document["time"], document["memory"]
    share = format_share(memory["peak_bytes"] / memory["limit_bytes"])
    sent = document["collective_bytes"]
    rows = [("predicted step time", format_seconds(document["predicted_step_s"]) if time else "not known")]
    if time:
        tokens = time["tokens_per_s"]
        rows += [
            ("tokens/s" if tokens else "examples/s", format_count(tokens or time["examples_per_s"])),
            ("MFU", f"{time['mfu']:.1%}"),
        ]
        rows += [("bound by", time["bound"])]
        if bar := time["error_bar"]:
            rows += [(f"error bar, from {bar['runs']} published runs", f"{bar['relative']:.0%}")]
    rows += [(f"peak memory, {share} of {format_bytes(memory['limit_bytes'])}", format_bytes(memory["peak_bytes"]))]
    rows += [("sent per device and step", "unknown" if sent is None else format_bytes(sent))]
    if (average := document["wire"].get("on_average")) is not None:
        most = format_bytes(document["wire"]["at_most"])
        rows += [(f"sent in a step on average, at most {most}", format_bytes(average))]
    return cards(rows)


def _findings(document: Mapping[str, Any]) -> str:
    colors = {"error": "c1", "warning": "c4", "note": "c0"}
    over = [
        f'<div class="finding c1"><p><b>over budget</b></p><p>{escape(text)}</p></div>'
        for text in document["budget"]["exceeded"]
    ]
    findings = [
        f'<div class="finding {colors.get(f["severity"], "")}"><p><b>{escape(f["severity"])}: {escape(f["code"])}</b> '
        f"{code(shown_source(f['source']))}</p><p>{escape(f['message'])}</p>{paragraph(f['fix'])}</div>"
        for f in document["findings"]
    ]
    return section("Findings", "".join(over + findings) or paragraph("None.", "none"))


def _stack(parts: Mapping[str, float], whole: float, of: float, shown: Callable[[float], str]) -> str:
    """Returns a bar of parts up to `whole`, and a line per part with its share of the number `of`."""
    ordered = list(enumerate(sorted(parts.items(), key=lambda item: -item[1])))
    pieces = "".join(
        f'<i class="{_color(n)}" style="width:{100 * x / whole:.3f}%" title="{escape(name)} {shown(x)}"></i>'
        for n, (name, x) in ordered
    )
    lines = (_line(name, x / of, shown(x), _color(n)) for n, (name, x) in ordered)
    return f'<div class="stack">{pieces}</div>{"".join(lines)}'


def _memory(document: Mapping[str, Any]) -> str:
    memory = document["memory"]
    limit, peak = memory["limit_bytes"], memory["peak_bytes"]
    bar = _stack(memory["parts"], max(limit, peak), max(peak, 1), format_bytes)
    host = (_line(f"{name}, on the host", 0, format_bytes(num), "") for name, num in memory["host_parts"].items())
    columns = {"bytes": NUMBER, "array": KEEP, "source": KEEP, "operation": WIDE}
    rows = [
        (format_bytes(b["bytes"]), b["shape"], code(shown_source(b["source"])), b["op_name"].replace("\\", ""))
        for b in memory["live"]
    ]
    live = f"<h3>Largest buffers at the peak</h3>{table(columns, rows)}" if rows else ""
    return f"{bar}{''.join(host)}{paragraph(f'The limit is {format_bytes(limit)}.')}{live}"


def _time(document: Mapping[str, Any]) -> str:
    time, step_s = document["time"], document["predicted_step_s"]
    if time is None:
        return paragraph("The step does not fit, so there is no compiled program.", "none")
    rates = f"are measured on {time['calibrated']}" if time["calibrated"] else "are from the chip table"
    text = f"Rates {rates}. Links count the time that does not overlap with computation."
    return _stack(time["parts"], step_s, step_s, format_seconds) + paragraph(text)


def _lines(document: Mapping[str, Any]) -> str:
    columns = {"line": KEEP, "time": NUMBER, "wait": NUMBER, "share": NUMBER, "MFU": NUMBER, "text": WIDE}
    cells = ((*line_cells(row, document), row["text"]) for row in document["lines"])
    rows = [(code(line), *figures, code(text)) for line, *figures, text in cells]
    text = (
        "Time: instructions. Wait: the device waits for the line's collectives. Both, and the bubble of a pipeline, sum "
        "to the step."
    )
    return paragraph(text) + table(columns, rows)


def line_cells(row: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Returns the line, time, wait, share of the step and MFU of a row of `lines`. Times below a ten-thousandth of the
    step are empty."""
    step_s, seconds, wait_s = document["predicted_step_s"], row["seconds"], row["exposed_s"]
    known: Callable[[float], str] = lambda x: format_seconds(x) if x > LEAST * step_s else ""
    mfu = row["flops"] / (seconds * document["time"]["peak_flops_per_s"]) if row["flops"] and seconds else None
    line, share = shown_source(row["source"]) or "no line", format_share((seconds + wait_s) / step_s)
    return line, known(seconds), known(wait_s), share, "" if mfu is None else format_share(mfu)


def _timeline_title(document: Mapping[str, Any]) -> str:
    return "Timeline of one iteration" if document["timeline"]["iterations"] > 1 else "Timeline of the step"


def _timeline(document: Mapping[str, Any]) -> str:
    """Returns one iteration of the longest loop: a row for the instructions, and one for each link."""
    timeline = document["timeline"]
    whole_s, rows = max(timeline["seconds"], 1e-12), []
    for row in timeline["rows"]:
        rects = "".join(_rect(span, whole_s) for span in timeline["spans"] if span["row"] == row)
        rows.append(
            f'<span>{escape(row)}</span><svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img"'
            f' aria-label="{escape(row)}">{rects}</svg>'
        )
    ticks = "".join(f"<span>{format_seconds(whole_s * n / 4)}</span>" for n in range(5))
    keys = "".join(f'<span class="swatch {style}">{name}</span>' for style, name in SPANS.values())
    omitted, what = timeline["omitted"], f"{timeline['title']}: {format_seconds(timeline['seconds'])}."
    more = paragraph(f"{omitted} short instructions are not drawn.") if omitted else ""
    drawn = f'<div class="lanes">{"".join(rows)}<span></span><div class="ticks">{ticks}</div></div>'
    return f'{paragraph(what)}<div class="legend">{keys}</div>{drawn}{more}'


def _rect(span: Mapping[str, Any], whole_s: float) -> str:
    start, end = (1000 * span[name] / whole_s for name in ("start_s", "end_s"))
    title = f"{span['name']} {format_seconds(span['end_s'] - span['start_s'])} {span['source'] or ''}"
    return (
        f'<rect class="{SPANS[span["kind"]][0]}" x="{start:.2f}" width="{max(end - start, 0.3):.2f}" height="20">'
        f"<title>{escape(title)}</title></rect>"
    )


def _line(name: str, share: float, value: str, color: str) -> str:
    kind = f"swatch {color}" if color else ""
    return (
        f'<div class="bar"><span class="{kind}">{escape(name)}</span>'
        f'<b class="{color}" style="width:{100 * share:.2f}%"></b><span>{escape(value)}</span></div>'
    )


def _color(number: int) -> str:
    return f"c{number % NUM_COLORS}"


def _wire(document: Mapping[str, Any]) -> str:
    rows = document["collectives"]
    if not rows:
        return paragraph("Nothing is sent." if document["fits"] else "Not known.", "none")
    totals = document["wire"]["by_axes"]
    most = max((num or 0 for num in totals.values()), default=0) or 1
    lines = "".join(
        _line(f"over {axes}", (num or 0) / most, "unknown" if num is None else format_bytes(num), _color(n))
        for n, (axes, num) in enumerate(totals.items())
    )
    needs = ", ".join(f"{a} {format_bytes(n)}" for a, n in document["wire"]["least"].items())
    needed = paragraph(f"Data parallelism by its formulas: {needs}.") if needs else ""
    columns = {"collective": KEEP, "over": KEEP, "link": KEEP, "bytes": NUMBER, "ops": NUMBER, "runs": NUMBER}
    bill = table(columns | {"why": WIDE, "source": WIDE}, map(_bill_row, rows))
    return f"{lines}{needed}<h3>Collectives, per device and step</h3>{bill}"


def _bill_row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    runs = "?" if row["trip_count"] is None else str(row["trip_count"])
    runs += f", every {row['every']} steps" if row.get("every", 1) > 1 else ""
    runs += f", to step {row['until']}" if "until" in row else ""
    num = format_bytes(row["bytes_at_least"]) + (" at least" if row["bytes"] is None else "")
    why = row["cause"] + ("" if row["counted"] else " (branch not counted)")
    what = (f"{row['op']} {row['dtype']}", " x ".join(row["axes"]), row["link"], num, row["count"])
    return *what, runs + (" in loop" if row["in_loop"] else ""), why, code(shown_source(row["source"]))


def _meshes(document: Mapping[str, Any]) -> str:
    if document["num_devices"] == 1:
        return paragraph("One device.", "none")
    drawn = []
    for axes, num in document["wire"]["by_axes"].items():
        names = [] if axes == "all" else axes.split(" x ")
        picture = draw_groups(document["mesh"], document["places"], names)
        amount = "unknown" if num is None else format_bytes(num)
        drawn.append(f"<div><h3>over {escape(axes)}: {amount} per device</h3>{picture}</div>")
    if not drawn:
        drawn = [draw_groups(document["mesh"], document["places"], [])]
    text = "Devices with the same number form a group and exchange data. Each square is a device."
    return f'{paragraph(text)}<div class="meshes">{"".join(drawn)}</div>'


def _candidates(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {"config": WIDE, "step": NUMBER, "memory": NUMBER, "status": KEEP, "why": WIDE}
    known: Callable[[Any, Callable[[Any], str]], str] = lambda value, shown: shown(value) if value else ""
    cells = [
        (
            *(row["name"], known(row["predicted_step_s"], format_seconds), known(row["peak_bytes"], format_bytes)),
            *(row["status"], row["reason"]),
        )
        for row in rows
    ]
    return table(columns, cells, [i for i, row in enumerate(rows) if row["status"] == "best"])


def _layout(document: Mapping[str, Any]) -> str:
    columns = {"leaf": WIDE, "array": KEEP, "sharded": KEEP, "memory": WIDE, "per device": NUMBER, "why": WIDE}
    leaves: Sequence[Mapping[str, Any]] = document["layout"]
    rows = [
        (
            *(code(leaf["path"]), f"{leaf['dtype']}{leaf['shape']}", _spec(leaf["spec"]), leaf["memory_kind"]),
            *(format_bytes(leaf["device_bytes"]), leaf["reason"]),
        )
        for leaf in leaves[:MAX_LEAVES]
    ]
    more = paragraph(f"and {len(leaves) - MAX_LEAVES} more") if len(leaves) > MAX_LEAVES else ""
    return table(columns, rows) + more


def _spec(spec: Sequence[Any]) -> str:
    return ", ".join("-" if d is None else d if isinstance(d, str) else "+".join(d) for d in spec) or "whole"
