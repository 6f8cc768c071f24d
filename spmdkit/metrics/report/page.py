"""The design of every page that a command writes: the style sheet, light and dark, and the elements of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

NUMBER, KEEP, WIDE, SHORT = ' class="number"', ' class="keep"', ' class="text"', ' class="short"'
"""Attributes of the cells of a column: a number, text that does not wrap, text that wraps within words, and text that
wraps between words."""
BEST = ' class="best"'

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b2330; --soft: #566173; --line: #dde2e9;
  --grid: #edf0f4; --faint: #c6ced9; --tint: #e6f0f9; --good: #00704f; --bad: #b84a00; --c0: #0072b2; --c1: #d55e00; --c2: #009e73;
  --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; --c6: var(--ink); --c7: #8a94a3; --c8: #d9cc1c; }
@media (prefers-color-scheme: dark) { :root { --page: #0f141b; --card: #171e28; --ink: #e4e9f0; --soft: #9aa7b9;
  --line: #2d3847; --grid: #222b37; --faint: #435165; --tint: #1b2d42; --good: #35c79b; --bad: #f58a4b; --c0: #4ba3e3; --c1: #f07f3c;
  --c2: #20b88c; --c3: #e09cc4; --c4: #f0b030; --c5: #9bd6f7; --c7: #77849a; --c8: #f0e442; } }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); --dash: 7 4; --rule: dashed; } .c2 { --c: var(--c2); --dash: 2 3; --rule: dotted; }
.c3 { --c: var(--c3); --dash: 12 4 2 4; --rule: double; } .c4 { --c: var(--c4); --dash: 14 5; --rule: dashed; }
.c5 { --c: var(--c5); --dash: 4 6; --rule: dotted; } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); --dash: 4 2; --rule: dashed; }
.c8 { --c: var(--c8); } .faint { --c: var(--faint); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 40px; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0; }
h2 { font-size: 17px; margin: 0 0 12px; }
h3 { font-size: 14px; margin: 0 0 6px; font-weight: 600; }
* + h3 { margin-top: 18px; }
p { margin: 6px 0; }
.lead, .none, .note, footer { color: var(--soft); }
.note, footer { font-size: 13px; }
.lead { margin: 4px 0 18px; }
.pill { font-size: 13px; font-weight: 600; padding: 2px 11px; border-radius: 99px; border: 1px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); } .open { color: var(--soft); }
.mark::before { content: "\\25cb"; display: inline-block; width: 1.1em; color: var(--soft); }
.mark.good::before { content: "\\2713"; color: inherit; } .mark.bad::before { content: "\\2715"; color: inherit; }
section, .card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
section { padding: 18px 20px; margin: 16px 0; }
.cards { display: grid; grid-template-columns: repeat(var(--wide), 1fr); gap: 12px; margin: 16px 0; }
.card { padding: 12px 16px; } .card:first-child { grid-column: span var(--wide-first); }
.card b { display: block; font-size: 21px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; display: block; line-height: 1.35; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); margin-bottom: 8px; }
.key::before { content: ""; display: inline-block; width: 22px; margin-right: 7px; vertical-align: middle;
  border-top: 3px var(--rule, solid) var(--c); }
.swatch::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px;
  background: var(--c); }
.swatch.hollow::before { background: none; border: 2px dashed var(--c); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; paint-order: stroke;
  stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); stroke-opacity: .6; }
line.bad { stroke: var(--bad); stroke-width: 2; } .fault line { stroke: var(--ink); stroke-width: 2; }
.fault path { fill: var(--ink); stroke: var(--card); }
polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-dasharray: var(--dash, none); }
polyline.raw { stroke-width: 1; stroke-opacity: .35; }
circle { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
rect { fill: var(--c); } .lanes rect { stroke: var(--card); stroke-width: .5; vector-effect: non-scaling-stroke; }
rect.hollow { fill: var(--card); stroke: var(--c); stroke-width: 2; stroke-dasharray: 4 2; }
.mesh rect + text { fill: #000; stroke: none; text-anchor: middle; font-size: 11px; pointer-events: none; }
.large > .narrow { display: none; }
.charts { display: grid; gap: 20px 24px; } .charts h3 { margin: 0 0 6px; }
@media (min-width: 601px) { .charts { grid-template-columns: 1fr 1fr; }
  .charts > :last-child:nth-child(odd) { grid-column: 1 / -1; width: calc(50% - 12px); justify-self: center; } }
@media (min-width: 901px) { .charts.three { grid-template-columns: 1fr 1fr 1fr; }
  .charts.three > :last-child:nth-child(odd) { grid-column: auto; width: auto; } }
.meshes { display: flex; flex-wrap: wrap; gap: 20px 40px; margin-top: 12px; } .meshes > div { max-width: 100%; }
.stack { display: flex; height: 30px; border-radius: 6px; overflow: hidden; background: var(--grid); margin: 4px 0 10px; }
.stack i, .bar b { background: var(--c); } .stack i { min-width: 1px; }
.bar { display: grid; grid-template-columns: 220px 1fr 90px; gap: 12px; align-items: center; font-size: 14px; padding: 3px 0; }
.bar b { height: 12px; border-radius: 3px; min-width: 2px; }
.bar span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.finding { border-left: 4px solid var(--c, var(--line)); padding-left: 14px; margin: 12px 0; } .finding p { margin: 2px 0; }
.lanes { display: grid; grid-template-columns: minmax(70px, max-content) 1fr; gap: 4px 10px; align-items: center;
  font-size: 13px; }
.lanes svg { height: 22px; background: var(--grid); border-radius: 3px; }
.ticks { display: flex; justify-content: space-between; color: var(--soft); font-size: 12px; }
.scroll { max-height: 420px; overflow: auto; } .sideways { max-height: none; } .hint { display: none; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 18px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 4px; }
th { color: var(--soft); font-weight: 600; overflow-wrap: normal; }
thead th { position: sticky; top: 0; background: var(--card); vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; } th.number { white-space: normal; } .number:first-child { width: 1%; } .keep { white-space: nowrap; }
td.text { min-width: 150px; } td.short { overflow-wrap: normal; white-space: pre-line; font-size: 12px; } .short { padding-right: 8px; }
.facts th { overflow-wrap: anywhere; font-weight: 500; width: 32%; padding-right: 24px; }
tr.best td { background: var(--tint); font-weight: 600; }
code, pre { font: 13px/1.5 ui-monospace, "Liberation Mono", Menlo, monospace; }
pre { margin: 0; white-space: pre-wrap; }
footer { text-align: center; margin-top: 28px; }
@media (max-width: 900px) { .cards { grid-template-columns: repeat(var(--middle), 1fr); }
  .card:first-child { grid-column: span var(--middle-first); } }
@media (max-width: 600px) { .cards { grid-template-columns: repeat(var(--narrow), 1fr); }
  .card:first-child { grid-column: span var(--narrow-first); } .card b { font-size: 18px; }
  main { padding: 20px 12px 32px; } section { padding: 14px; } .bar { grid-template-columns: 130px 1fr 74px; gap: 8px; }
  .hint, .large > .narrow { display: block; } .large > .broad { display: none; }
  thead th, th.number { white-space: nowrap; } td.text { min-width: 240px; } }
@media print { .scroll { max-height: none; overflow: visible; } section { break-inside: avoid; } }
"""
"""The style sheet of every page. `c0` to `c8` are the colors of Okabe and Ito, which readers with any color vision can
distinguish (https://jfly.uni-koeln.de/color/); lines also differ by their dashes, and states by a mark."""
NUM_COLORS = 8
COLUMNS = {"wide": 6, "middle": 4, "narrow": 2}
"""Width of the window -> the largest number of tiles in a row."""


class Html(str):
    """Text that is already HTML; it is not escaped again."""


def html(value: Any) -> str:
    """Returns a value as HTML."""
    return value if isinstance(value, Html) else escape(str(value))


def code(value: Any) -> Html:
    """Returns an identifier or a source line in a fixed-width font."""
    return Html(f"<code>{escape(str(value or ''))}</code>")


def mark(tone: str, text: str) -> Html:
    """Returns a text after a sign of its state. `tone`: `good`, `bad` or another one."""
    return Html(f'<span class="mark {tone}">{escape(text)}</span>')


def paragraph(text: str, kind: str = "note") -> str:
    """Returns a paragraph in a soft color. `kind`: `note` or `none` (no content)."""
    return f'<p class="{kind}">{escape(text)}</p>'


def heading(name: str, pills: Iterable[tuple[str, str]], facts: Iterable[str]) -> str:
    """Returns the head of a page: its name, (tone, text) of each pill, and the facts below it."""
    shown = "".join(f'<span class="pill mark {tone}">{escape(text)}</span>' for tone, text in pills)
    lead = " &middot; ".join(map(escape, facts))
    return f'<header><h1>{escape(name)}</h1>{shown}</header>\n<p class="lead">{lead}</p>'


def page(title: str, parts: Iterable[str], source: str) -> str:
    """Returns the complete document. Its policy forbids the browser to load or run anything.

    Args:
        parts: the elements of the body; empty ones are omitted.
        source: the command that makes the page.
    """
    body = "\n".join(part for part in parts if part)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} - spmdkit</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
<footer>Made by {escape(source)}.</footer>
</main>
</body>
</html>
"""


def section(title: str, body: str) -> str:
    """Returns a titled box."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def cards(facts: Sequence[tuple[str, str]]) -> str:
    """Returns tiles: large values above their names, without empty values. They fill every row at every width."""
    shown = [(name, value) for name, value in facts if value]
    style = []
    for width, most in COLUMNS.items():
        rows = math.ceil(len(shown) / most)
        columns = math.ceil(len(shown) / max(rows, 1))
        style.append(f"--{width}: {columns}; --{width}-first: {1 + rows * columns - len(shown)}")
    items = [f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in shown]
    return f'<div class="cards" style="{"; ".join(style)}">{"".join(items)}</div>' if items else ""


def chart_grid(charts: Sequence[tuple[str, str]]) -> str:
    """Returns (name, SVG) of charts in two columns, or in three if these fill their rows."""
    items = "".join(f"<div><h3>{escape(name)}</h3>{chart}</div>" for name, chart in charts)
    return f'<div class="charts{" three" if len(charts) % 3 == 0 else ""}">{items}</div>'


def large(draw: Callable[[int, int], str], height: int) -> str:
    """Returns a chart at the width of the page and one for a narrow window, of which the style sheet shows one.

    Args:
        draw: width and height -> an SVG, or a sentence.
    """
    broad, narrow = draw(1000, height), draw(400, 260)
    if not broad.startswith("<svg"):
        return broad
    return f'<div class="large"><div class="broad">{broad}</div><div class="narrow">{narrow}</div></div>'


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
