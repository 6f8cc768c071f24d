"""A plan as one self-contained page: memory, wire, time, the mesh with who talks to whom, every leaf, every finding.

Made from the plan's JSON alone. Nothing is loaded and nothing is executed; every text is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation.files import write_text
from spmdkit.foundation.formatting import format_bytes, format_count, format_seconds
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.report.drawing import draw_groups
from spmdkit.metrics.report.page import cards, page, section, table

COLOURS = ("#2563eb", "#c2570c", "#15803d", "#9333ea", "#0891b2", "#be185d", "#a16207", "#64748b")
MOST_LEAVES = 2000
_STYLE = """<style>
.stack { display: flex; height: 34px; border-radius: 8px; overflow: hidden; background: var(--grid); margin: 4px 0 10px; }
.stack i { display: block; height: 100%; min-width: 1px; }
.scale { position: relative; height: 18px; font-size: 12px; color: var(--soft); }
.swatch::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  background: var(--c); }
.line { display: grid; grid-template-columns: minmax(110px, 220px) 1fr 110px; gap: 12px; align-items: center; font-size: 14px; padding: 3px 0; }
.line b { display: block; height: 12px; border-radius: 4px; background: var(--c, var(--train)); min-width: 2px; }
.line span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.finding { border-left: 4px solid var(--soft); padding: 2px 0 2px 14px; margin: 12px 0; }
.finding.error { border-color: var(--bad); } .finding.warning { border-color: var(--eval); } .finding.note { border-color: var(--train); }
.finding p { margin: 2px 0; } code { font: 13px ui-monospace, "Liberation Mono", Menlo, monospace; }
section > h3, section > div > h3 { margin-top: 16px; } .note { margin: 6px 0; } td.number { white-space: nowrap; }
.meshes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 20px; }
svg.mesh { width: 100%; height: auto; max-height: 360px; } svg.mesh text { fill: #fff; font-size: 11px; text-anchor: middle; }
svg.mesh text.plane { fill: var(--soft); text-anchor: start; }
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
            f"--html {path} cannot be written ({error.strerror}). Name a file in a folder that can."
        ) from error
    return path


def plan_page(document: Mapping[str, Any]) -> str:
    """Returns the whole HTML document."""
    name = Path(document["source"]).stem if document.get("source") else "plan"
    return page(f"{name} on {document['target']} - spmdkit plan", _STYLE + plan_body(name, document))


def plan_body(name: str, document: Mapping[str, Any]) -> str:
    """Returns the sections of a plan."""
    parts = [
        _heading(name, document),
        _cards(document),
        _findings(document),
        section("Memory of a device", _memory(document)),
        section("Time of a step", _time(document)),
        section("On the wire", _wire(document)),
        section("Mesh", _meshes(document)),
        section(f"Layout of {len(document['layout'])} leaves", _layout(document)),
        *([section("Candidates", _candidates(document["candidates"]))] if document.get("candidates") else []),
        section("Config", f"<pre>{escape(document['config'])}</pre>"),
        "<footer>Made by spmdkit plan.</footer>",
    ]
    return "\n".join(parts)


def _heading(name: str, document: Mapping[str, Any]) -> str:
    pill = '<span class="pill good">fits</span>' if document["fits"] else '<span class="pill bad">does not fit</span>'
    if document["budget"]["exceeded"]:
        pill += '<span class="pill bad">over budget</span>'
    facts = [
        escape(document["target"]),
        f"{document['num_devices']} devices",
        escape(describe_mesh(document["mesh"])),
        f"{format_count(document['num_params'])} parameters",
        f"batch {document['batch_size']}",
    ]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in document["notes"])
    return f'<header><h1>{escape(name)}</h1>{pill}</header>\n<p class="lead">{" &middot; ".join(facts)}</p>{notes}'


def _cards(document: Mapping[str, Any]) -> str:
    time, memory = document["time"], document["memory"]
    share = f"{memory['peak_bytes'] / memory['limit_bytes']:.0%}"
    sent = document["collective_bytes"]
    rows = [("a step, predicted", format_seconds(document["predicted_step_s"]) if time else "not known")]
    if time:
        tokens = time["tokens_per_s"]
        rows += [
            ("tokens/s" if tokens else "examples/s", format_count(tokens or time["examples_per_s"])),
            ("MFU", f"{time['mfu']:.1%}"),
        ]
        rows += [("bound by", time["bound"])]
    rows += [(f"of {format_bytes(memory['limit_bytes'])} ({share})", format_bytes(memory["peak_bytes"]))]
    rows += [("sent by a device", "unknown" if sent is None else format_bytes(sent))]
    if (average := document["wire"].get("on_average")) is not None:
        most = format_bytes(document["wire"]["at_most"])
        rows += [(f"sent in a step on average, at most {most}", format_bytes(average))]
    return cards(rows)


# ---- findings --------------------------------------------------------------------------------------------------------


def _findings(document: Mapping[str, Any]) -> str:
    over = [
        f'<div class="finding error"><p><b>over budget</b> {escape(text)}</p></div>'
        for text in document["budget"]["exceeded"]
    ]
    found = [
        f'<div class="finding {escape(f["severity"])}"><p><b>{escape(f["code"])}</b> '
        f"<code>{escape(f['source'] or '')}</code></p>"
        f'<p>{escape(f["message"])}</p><p class="note">{escape(f["fix"])}</p></div>'
        for f in document["findings"]
    ]
    return section("Findings", "".join(over + found) or '<p class="none">None.</p>')


# ---- memory and time
# --------------------------------------------------------------------------------------------------


def _memory(document: Mapping[str, Any]) -> str:
    memory = document["memory"]
    parts = sorted(memory["parts"].items(), key=lambda item: -item[1])
    whole = max(memory["limit_bytes"], memory["peak_bytes"])
    bar = "".join(
        f'<i style="width:{100 * num / whole:.3f}%;background:{_colour(n)}" title="{escape(name)} '
        f'{format_bytes(num)}"></i>'
        for n, (name, num) in enumerate(parts)
    )
    at = 100 * memory["limit_bytes"] / whole
    scale = (
        f'<div class="scale"><span style="position:absolute;right:{100 - at:.2f}%">limit '
        f"{format_bytes(memory['limit_bytes'])}</span></div>"
    )
    peak = max(memory["peak_bytes"], 1)
    lines = "".join(_line(name, num / peak, format_bytes(num), _colour(n)) for n, (name, num) in enumerate(parts))
    host = "".join(
        _line(f"{name}, on the host", 0, format_bytes(num), "") for name, num in memory["host_parts"].items()
    )
    rows = [
        f'<tr><td class="number">{format_bytes(b["bytes"])}</td><td>{escape(b["shape"])}</td><td><code>{escape(b["source"] or "")}</code></td>'
        f"<td>{escape(b['op_name'])}</td></tr>"
        for b in memory["live"]
    ]
    head = [("bytes", ' class="number"'), ("array", ""), ("source", ""), ("operation", "")]
    live = f"<h3>Largest buffers at the peak</h3>{table(head, rows)}" if rows else ""
    return f'<div class="stack memory">{bar}</div>{scale}{lines}{host}{live}'


def _time(document: Mapping[str, Any]) -> str:
    time = document["time"]
    if time is None:
        return '<p class="none">The compiler made no program: it does not fit.</p>'
    step_s = document["predicted_step_s"]
    parts = sorted(time["parts"].items(), key=lambda item: -item[1])
    bar = "".join(
        f'<i style="width:{100 * part / step_s:.3f}%;background:{_colour(n)}" title="{escape(name)} '
        f'{format_seconds(part)}"></i>'
        for n, (name, part) in enumerate(parts)
    )
    lines = "".join(
        _line(name, part / step_s, format_seconds(part), _colour(n)) for n, (name, part) in enumerate(parts)
    )
    rates = f"measured on {time['calibrated']}" if time["calibrated"] else "of the chip table"
    return (
        f'<div class="stack">{bar}</div>{lines}<p class="note after">Rates {escape(rates)}. Links show the '
        "time that nothing hides.</p>"
    )


def _line(name: str, share: float, value: str, colour: str) -> str:
    return (
        f'<div class="line"><span class="swatch" style="--c:{colour or "transparent"}">{escape(name)}</span>'
        f'<b style="width:{100 * share:.2f}%;--c:{colour or "transparent"}"></b><span>{escape(value)}</span></div>'
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


# ---- wire and mesh
# ----------------------------------------------------------------------------------------------------


def _wire(document: Mapping[str, Any]) -> str:
    rows = document["collectives"]
    if not rows:
        return '<p class="none">Nothing is sent.</p>' if document["fits"] else '<p class="none">Not known.</p>'
    totals = document["wire"]["by_axes"]
    most = max((num or 0 for num in totals.values()), default=0) or 1
    least = document["wire"]["least"]
    lines = "".join(
        _line(f"over {axes}", (num or 0) / most, "unknown" if num is None else format_bytes(num), _colour(n))
        for n, (axes, num) in enumerate(totals.items())
    )
    needs = ", ".join(f"{escape(a)} {format_bytes(n)}" for a, n in least.items())
    note = f'<p class="note">Data parallelism by its formulas: {needs}.</p>' if needs else ""
    head = [(n, "") for n in ("collective", "over", "link")]
    head += [
        ("bytes", ' class="number"'),
        ("ops", ' class="number"'),
        ("runs", ' class="number"'),
        ("why", ""),
        ("source", ""),
    ]
    return (
        f'<div class="bill">{lines}</div>{note}<h3>Bill, of one device and '
        f"step</h3>{table(head, [_bill_row(r) for r in rows])}"
    )


def _bill_row(row: Mapping[str, Any]) -> str:
    runs = "?" if row["trip_count"] is None else str(row["trip_count"])
    runs += f", every {row['every']} steps" if row.get("every", 1) > 1 else ""
    runs += f", to step {row['until']}" if "until" in row else ""
    num = format_bytes(row["bytes_at_least"]) + (" at least" if row["bytes"] is None else "")
    counted = "" if row["counted"] else " (branch not counted)"
    return (
        f'<tr><td class="keep">{escape(row["op"])} '
        f"{escape(row['dtype'])}</td><td>{escape(' x '.join(row['axes']))}</td>"
        f'<td>{escape(row["link"])}</td><td class="number">{num}</td><td class="number">{row["count"]}</td>'
        f'<td class="number">{runs}{" in loop" if row["in_loop"] else ""}</td><td>{escape(row["cause"])}{counted}</td>'
        f"<td><code>{escape(row['source'] or '')}</code></td></tr>"
    )


def _meshes(document: Mapping[str, Any]) -> str:
    if document["num_devices"] == 1:
        return '<p class="none">One device.</p>'
    drawn = []
    for axes, num in document["wire"]["by_axes"].items():
        names = [] if axes == "all" else axes.split(" x ")
        picture = draw_groups(document["mesh"], document["places"], names)
        amount = "unknown" if num is None else format_bytes(num)
        drawn.append(f"<div><h3>over {escape(axes)}: {amount} a device</h3>{picture}</div>")
    if not drawn:
        drawn = [draw_groups(document["mesh"], document["places"], [])]
    note = '<p class="note">Devices of one colour talk to each other. Numbers are places in the mesh.</p>'
    return f'{note}<div class="meshes">{"".join(drawn)}</div>'


def _candidates(rows: Sequence[Mapping[str, Any]]) -> str:
    head = [("", ""), ("step", ' class="number"'), ("memory", ' class="number"'), ("", ""), ("why", "")]
    body = [
        f"<tr{' class=best' if row['status'] == 'best' else ''}><td>{escape(row['name'])}</td>"
        f'<td class="number">{format_seconds(row["predicted_step_s"]) if row["predicted_step_s"] else ""}</td>'
        f'<td class="number">{format_bytes(row["peak_bytes"]) if row["peak_bytes"] else ""}</td>'
        f'<td class="keep">{escape(row["status"])}</td><td>{escape(row["reason"])}</td></tr>'
        for row in rows
    ]
    return table(head, body)


# ---- layout ----------------------------------------------------------------------------------------------------------


def _layout(document: Mapping[str, Any]) -> str:
    head = [("leaf", ""), ("array", ""), ("cut", ""), ("memory", ""), ("of a device", ' class="number"'), ("why", "")]
    leaves: Sequence[Mapping[str, Any]] = document["layout"]
    rows = [
        f"<tr><td><code>{escape(leaf['path'])}</code></td><td "
        f'class="keep">{escape(leaf["dtype"])}{escape(str(leaf["shape"]))}</td>'
        f'<td class="keep">{escape(_spec(leaf["spec"]))}</td><td>{escape(leaf["memory_kind"])}</td>'
        f'<td class="number">{format_bytes(leaf["device_bytes"])}</td><td>{escape(leaf["reason"])}</td></tr>'
        for leaf in leaves[:MOST_LEAVES]
    ]
    more = f'<p class="note">and {len(leaves) - MOST_LEAVES} more</p>' if len(leaves) > MOST_LEAVES else ""
    return table(head, rows) + more


def _spec(spec: Sequence[Any]) -> str:
    if not spec:
        return "whole"
    return ", ".join("-" if d is None else d if isinstance(d, str) else "+".join(d) for d in spec)
