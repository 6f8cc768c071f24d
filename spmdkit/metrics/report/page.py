"""The frame of `report.html`: its style sheet, light and dark, and the HTML elements of its sections."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

NUMBER, KEEP, WIDE = ' class="number"', ' class="keep"', ""
"""Attributes of the cells of a column: a number, text that does not wrap, text."""
BEST = ' class="best"'

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --soft: #5c6778; --line: #e1e5eb; --grid: #edf0f4;
  --train: #2563eb; --eval: #c2570c; --good: #15803d; --bad: #dc2626; --tint: #eff4ff; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f141b; --card: #171e28; --ink: #e4e9f0; --soft: #93a0b3; --line: #2a3442; --grid: #222b37;
  --train: #6ea8fe; --eval: #fb9a4b; --good: #4ade80; --bad: #f87171; --tint: #1b2739; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 32px 20px 56px; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 14px; margin-bottom: 4px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 12px; }
h3 { font-size: 14px; margin: 0 0 6px; color: var(--soft); font-weight: 600; overflow-wrap: anywhere; }
.lead { color: var(--soft); margin: 2px 0 20px; }
.pill { font-size: 13px; font-weight: 600; padding: 2px 11px; border-radius: 99px; border: 1px solid currentColor; }
.pill.good { color: var(--good); } .pill.bad { color: var(--bad); } .pill.open { color: var(--train); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 18px 20px; margin: 16px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 12px; margin: 16px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 12px 16px; }
.card b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); margin-bottom: 6px; }
.key::before { content: ""; display: inline-block; width: 18px; height: 3px; border-radius: 2px; margin-right: 7px;
  vertical-align: middle; background: var(--train); }
.key.eval::before { background: var(--eval); }
svg.chart { display: block; width: 100%; height: auto; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--soft); stroke-opacity: .6; }
svg .bad { stroke: var(--bad); stroke-width: 2; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg polyline { fill: none; stroke: var(--train); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg polyline.raw { stroke-width: 1; stroke-opacity: .32; } svg polyline.eval { stroke: var(--eval); }
svg circle { fill: var(--train); stroke: var(--card); stroke-width: 1.5; } svg circle.eval { fill: var(--eval); }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); gap: 20px 24px; }
.scroll { max-height: 380px; overflow: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
td.number, th.number { text-align: right; padding: 5px 18px 5px 0; }
table.facts th { color: var(--soft); font-weight: 500; white-space: nowrap; width: 1%; padding-right: 24px; }
td { overflow-wrap: anywhere; } td.keep { white-space: nowrap; }
tr.best td { background: var(--tint); font-weight: 600; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; background: var(--soft); margin-right: 8px; }
.dot.good { background: var(--good); } .dot.bad { background: var(--bad); } .dot.open { background: var(--train); }
pre { margin: 0; font: 13px/1.5 ui-monospace, "Liberation Mono", Menlo, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.none, .note { color: var(--soft); margin: 0; } .after { margin-top: 10px; font-size: 13px; }
footer { color: var(--soft); font-size: 13px; text-align: center; margin-top: 28px; }
@media print { body { background: #fff; } .scroll { max-height: none; } section { break-inside: avoid; } }
"""


class Html(str):
    """Text that is already HTML; it is not escaped again."""


def html(value: Any) -> str:
    """Returns a value as HTML."""
    return value if isinstance(value, Html) else escape(str(value))


def code(value: Any) -> Html:
    """Returns an identifier or a source line in a fixed-width font."""
    return Html(f"<code>{escape(str(value or ''))}</code>")


def paragraph(text: str, kind: str = "note") -> str:
    """Returns a paragraph in a soft color. `kind`: `note`, `after` (a note after an element), `none` (no content)."""
    return f'<p class="{kind}">{escape(text)}</p>'


def heading(name: str, pills: Iterable[tuple[str, str]], facts: Iterable[str]) -> str:
    """Returns the head of a page: its name, (tone, text) of each pill, and the facts below it."""
    shown = "".join(f'<span class="pill {tone}">{escape(text)}</span>' for tone, text in pills)
    lead = " &middot; ".join(map(escape, facts))
    return f'<header><h1>{escape(name)}</h1>{shown}</header>\n<p class="lead">{lead}</p>'


def page(title: str, body: str) -> str:
    """Returns the complete document. Its policy forbids the browser to load or run anything."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def section(title: str, body: str) -> str:
    """Returns a titled box."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def cards(facts: Sequence[tuple[str, str]]) -> str:
    """Returns a row of large values above their names, without empty values."""
    items = [f'<div class="card"><b>{escape(v)}</b><span>{escape(name)}</span></div>' for name, v in facts if v]
    return f'<div class="cards">{"".join(items)}</div>' if items else ""


def fact_table(facts: Sequence[tuple[str, Any]]) -> str:
    """Returns a table of names and values, without empty values."""
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>'
        for name, value in facts
        if value not in (None, "")
    ]
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]], best: Collection[int] = ()) -> str:
    """Returns a table that scrolls in its box.

    Args:
        columns: name -> attributes of its cells.
        rows: the values of each row.
        best: indices of highlighted rows.
    """
    names = "".join(f'<th scope="col"{attributes}>{escape(name)}</th>' for name, attributes in columns.items())
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{a}>{html(x)}</td>" for a, x in zip(columns.values(), row, strict=True))
        lines.append(f"<tr{BEST if number in best else ''}>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
