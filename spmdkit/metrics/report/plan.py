"""A plan as one self-contained page: memory, communication, time, the mesh with its groups, every leaf, every finding.

Uses only the plan's JSON. The page loads and executes nothing; every text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation.files import write_text
from spmdkit.foundation.formatting import format_bytes, format_count, format_seconds, shown_source
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.report.drawing import draw_groups
from spmdkit.metrics.report.page import KEEP, NUMBER, WIDE, cards, code, heading, page, paragraph, section, table

COLORS = ("#2563eb", "#c2570c", "#15803d", "#9333ea", "#0891b2", "#be185d", "#a16207", "#64748b")
MAX_LEAVES = 2000
_STYLE = """<style>
.stack { display: flex; height: 34px; border-radius: 8px; overflow: hidden; background: var(--grid); margin: 4px 0 10px; }
.stack i { display: block; height: 100%; min-width: 1px; }
.swatch::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  background: var(--c); }
.line { display: grid; grid-template-columns: minmax(110px, 220px) 1fr 110px; gap: 12px; align-items: center; font-size: 14px; padding: 3px 0; }
.line b { display: block; height: 12px; border-radius: 4px; background: var(--c, var(--train)); min-width: 2px; }
.line span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.finding { border-left: 4px solid var(--soft); padding: 2px 0 2px 14px; margin: 12px 0; }
.finding.error { border-color: var(--bad); } .finding.warning { border-color: var(--eval); } .finding.note { border-color: var(--train); }
.finding p { margin: 2px 0; } p { overflow-wrap: anywhere; } code { font: 13px ui-monospace, "Liberation Mono", Menlo, monospace; }
section > h3, section > div > h3 { margin-top: 16px; } .note { margin: 6px 0; } td.number { white-space: nowrap; }
.meshes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 20px; }
svg.mesh { width: 100%; height: auto; max-height: 360px; } svg.mesh text { fill: #fff; font-size: 11px; text-anchor: middle; }
.timeline { display: grid; grid-template-columns: minmax(70px, max-content) 1fr; gap: 4px 10px; align-items: center; font-size: 13px; }
.timeline svg { width: 100%; height: 22px; display: block; background: var(--grid); border-radius: 3px; }
.timeline .ticks { display: flex; justify-content: space-between; color: var(--soft); font-size: 12px; } .timeline .ticks i { font-style: normal; }
rect.run { fill: var(--train); } rect.loop { fill: var(--soft); } rect.wait { fill: var(--bad); } rect.transfer { fill: var(--good); }
rect.run, rect.transfer { stroke: var(--card); stroke-width: .5; vector-effect: non-scaling-stroke; }
.spans .key::before { height: 11px; width: 11px; } .key.loop::before { background: var(--soft); } .key.wait::before { background: var(--bad); }
.key.transfer::before { background: var(--good); }
svg.mesh text.plane { fill: var(--soft); text-anchor: start; }
@media (max-width: 700px) { .scroll table { min-width: 660px; } .line { grid-template-columns: 120px 1fr 74px; gap: 8px; }
  .card b { font-size: 18px; } }
</style>"""


def write_page(document: Mapping[str, Any], path: Path) -> Path:
    """Writes the page of a plan and returns its path.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, plan_page(document))
    except OSError as error:
        raise ConfigError(
            f"--html {path} cannot be written ({error.strerror}). Choose a file in a writable folder."
        ) from error
    return path


def plan_page(document: Mapping[str, Any]) -> str:
    """Returns the complete HTML document."""
    name = Path(document["source"]).stem if document.get("source") else "plan"
    return page(f"{name} on {document['target']} - spmdkit plan", _STYLE + plan_body(name, document))


def plan_body(name: str, document: Mapping[str, Any]) -> str:
    """Returns the sections of a plan."""
    parts = [
        _heading(name, document),
        _cards(document),
        _findings(document),
        section("Memory per device", _memory(document)),
        section("Predicted step time", _time(document)),
        *([section("Time by line", _lines(document))] if document["time"] and document.get("lines") else []),
        *(
            [section("Timeline of one layer", _timeline(document))]
            if document["time"] and document.get("timeline")
            else []
        ),
        section("Communication", _wire(document)),
        section("Mesh", _meshes(document)),
        section(f"Layout of {len(document['layout'])} leaves", _layout(document)),
        *([section("Candidates", _candidates(document["candidates"]))] if document.get("candidates") else []),
        *([section("Config", f"<pre>{escape(document['config'])}</pre>")] if document["config"] else []),
        "<footer>Made by spmdkit plan.</footer>",
    ]
    return "\n".join(parts)


def _heading(name: str, document: Mapping[str, Any]) -> str:
    pills = [("good", "fits") if document["fits"] else ("bad", "does not fit")]
    pills += [("bad", "over budget")] if document["budget"]["exceeded"] else []
    facts = [
        *(document["target"], f"{document['num_devices']} devices", describe_mesh(document["mesh"])),
        *(f"{format_count(document['num_params'])} parameters", f"batch {document['batch_size']}"),
    ]
    return heading(name, pills, facts) + "".join(map(paragraph, document["notes"]))


def _cards(document: Mapping[str, Any]) -> str:
    time, memory = document["time"], document["memory"]
    share = f"{memory['peak_bytes'] / memory['limit_bytes']:.0%}"
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
    rows += [(f"of {format_bytes(memory['limit_bytes'])} ({share})", format_bytes(memory["peak_bytes"]))]
    rows += [("bytes sent per device", "unknown" if sent is None else format_bytes(sent))]
    if (average := document["wire"].get("on_average")) is not None:
        most = format_bytes(document["wire"]["at_most"])
        rows += [(f"sent in a step on average, at most {most}", format_bytes(average))]
    return cards(rows)


def _findings(document: Mapping[str, Any]) -> str:
    over = [
        f'<div class="finding error"><p><b>over budget</b> {escape(text)}</p></div>'
        for text in document["budget"]["exceeded"]
    ]
    findings = [
        f'<div class="finding {escape(f["severity"])}"><p><b>{escape(f["code"])}</b> {code(shown_source(f["source"]))}</p>'
        f"<p>{escape(f['message'])}</p>{paragraph(f['fix'])}</div>"
        for f in document["findings"]
    ]
    return section("Findings", "".join(over + findings) or paragraph("None.", "none"))


def _stack(parts: Mapping[str, float], whole: float, of: float, shown: Callable[[float], str], kind: str = "") -> str:
    """Returns a bar of parts up to `whole`, and a line per part with its share of the number `of`."""
    ordered = list(enumerate(sorted(parts.items(), key=lambda item: -item[1])))
    bar = "".join(
        f'<i style="width:{100 * x / whole:.3f}%;background:{_color(n)}" title="{escape(name)} {shown(x)}"></i>'
        for n, (name, x) in ordered
    )
    return f'<div class="stack{kind}">{bar}</div>' + "".join(
        _line(name, x / of, shown(x), _color(n)) for n, (name, x) in ordered
    )


def _memory(document: Mapping[str, Any]) -> str:
    memory = document["memory"]
    limit, peak = memory["limit_bytes"], memory["peak_bytes"]
    bar = _stack(memory["parts"], max(limit, peak), max(peak, 1), format_bytes, " memory")
    host = (_line(f"{name}, on the host", 0, format_bytes(num), "") for name, num in memory["host_parts"].items())
    columns = {"bytes": NUMBER, "array": KEEP, "source": KEEP, "operation": WIDE}
    rows = [
        (format_bytes(b["bytes"]), b["shape"], code(shown_source(b["source"])), b["op_name"]) for b in memory["live"]
    ]
    live = f"<h3>Largest buffers at the peak</h3>{table(columns, rows)}" if rows else ""
    return f"{bar}{''.join(host)}{paragraph(f'The limit is {format_bytes(limit)}.')}{live}"


def _time(document: Mapping[str, Any]) -> str:
    time, step_s = document["time"], document["predicted_step_s"]
    if time is None:
        return paragraph("The compiler made no program: it does not fit.", "none")
    rates = f"measured on {time['calibrated']}" if time["calibrated"] else "of the chip table"
    text = f"Rates {rates}. For links, the time that is not overlapped."
    return _stack(time["parts"], step_s, step_s, format_seconds) + paragraph(text, "note after")


def _lines(document: Mapping[str, Any]) -> str:
    step_s, peak = document["predicted_step_s"], document["time"]["peak_flops_per_s"]
    columns = {"line": KEEP, "time": NUMBER, "wait": NUMBER, "share": NUMBER, "MFU": NUMBER, "text": WIDE}
    known: Callable[[float], str] = lambda seconds: format_seconds(seconds) if seconds > 1e-4 * step_s else ""
    rows = [
        (
            *(code(shown_source(row["source"]) or "no line"), known(row["seconds"]), known(row["exposed_s"])),
            f"{(row['seconds'] + row['exposed_s']) / step_s:.1%}",
            f"{row['flops'] / (row['seconds'] * peak):.0%}" if row["flops"] and row["seconds"] else "",
            code(row["text"]),
        )
        for row in document["lines"]
    ]
    text = (
        "Time: instructions. Wait: the device waits for the line's collectives. Both, and the bubble of a pipeline, sum "
        "to the step."
    )
    return paragraph(text) + table(columns, rows)


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
    ticks = "".join(f"<i>{format_seconds(whole_s * n / 4)}</i>" for n in range(5))
    keys = {"run": "instruction", "loop": "inner loop", "wait": "exposed: waits for a transfer", "transfer": "transfer"}
    legend = "".join(f'<span class="key {kind}">{name}</span>' for kind, name in keys.items())
    more = paragraph(f"{timeline['omitted']} short ones are not drawn.", "after") if timeline["omitted"] else ""
    what = paragraph(f"{timeline['title']}: {format_seconds(timeline['seconds'])}.")
    drawn = f'<div class="timeline">{"".join(rows)}<span></span><div class="ticks">{ticks}</div></div>'
    return f'{what}<div class="legend spans">{legend}</div>{drawn}{more}'


def _rect(span: Mapping[str, Any], whole_s: float) -> str:
    start, end = (1000 * span[name] / whole_s for name in ("start_s", "end_s"))
    title = f"{span['name']} {format_seconds(span['end_s'] - span['start_s'])} {span['source'] or ''}"
    return (
        f'<rect class="{escape(span["kind"])}" x="{start:.2f}" width="{max(end - start, 0.3):.2f}" height="20">'
        f"<title>{escape(title)}</title></rect>"
    )


def _line(name: str, share: float, value: str, color: str) -> str:
    return (
        f'<div class="line"><span class="swatch" style="--c:{color or "transparent"}">{escape(name)}</span>'
        f'<b style="width:{100 * share:.2f}%;--c:{color or "transparent"}"></b><span>{escape(value)}</span></div>'
    )


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


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
    return f'<div class="bill">{lines}</div>{needed}<h3>Collectives, per device and step</h3>{bill}'


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
        drawn.append(f"<div><h3>over {escape(axes)}: {amount} a device</h3>{picture}</div>")
    if not drawn:
        drawn = [draw_groups(document["mesh"], document["places"], [])]
    text = "Devices of one color talk to each other. Numbers are places in the mesh."
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
