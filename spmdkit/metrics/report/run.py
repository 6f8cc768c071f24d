"""`report.html`: a run on one page: curves, evaluations, throughput, config, environment, events.

Uses only the files of the run directory, so it can be created at any time, also for an active or a killed run. The page
loads and executes nothing; every text from the files is escaped.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation.files import json_object, read_regular, write_text
from spmdkit.foundation.formatting import (
    counted,
    format_bytes,
    format_duration,
    format_rate,
    format_seconds,
    format_value,
)
from spmdkit.foundation.run_status import unfinished
from spmdkit.metrics.events import parse_time
from spmdkit.metrics.jsonl import FIRST_KEYS, LAST_KEYS, read_lines
from spmdkit.metrics.report.chart import Series, legend, line_chart
from spmdkit.metrics.report.communication import communication_section
from spmdkit.metrics.report.page import (
    KEEP,
    NUM_COLORS,
    NUMBER,
    WIDE,
    cards,
    chart_grid,
    code,
    fact_table,
    heading,
    large,
    mark,
    page,
    paragraph,
    section,
    table,
)

MAX_SMALL_CHARTS = 12
MAX_EVENTS = 300
LARGEST = 1e150
TONES = {
    "stopped": "good",
    "finished": "good",
    "fault": "bad",
    "exited": "bad",
    "preempted": "bad",
    "started": "open",
    "restored": "open",
}

Record = Mapping[str, Any]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `report.html` to a run directory and returns its path.

    Files other than `metrics.jsonl` may be missing or damaged; their section then states it. Raises ConfigError if
    `run_dir` has no `metrics.jsonl` or cannot be written.
    """
    folder = Path(run_dir)
    if not (folder / "metrics.jsonl").is_file():
        found = f"{len(list(folder.iterdir()))} other entries" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"report of {folder}: no metrics.jsonl there, found {found}."
            " A report is made from a run's directory, which `spmdkit train` writes."
            " Pass the run_dir of the config that was trained (by default runs/<config name> in the config's folder)."
        )
    name = folder.resolve().name
    records = [r for r in read_lines(folder / "metrics.jsonl") if _is_step(r.get("step"))]
    events = read_lines(folder / "events.jsonl")
    unfinished_run = unfinished(folder)
    if unfinished_run is not None and not unfinished_run.alive:
        events.append({"event": "exited", "process": 0, "step": unfinished_run.step, "why": unfinished_run.message()})
    files = [
        _json_object(folder / file) for file in ("environment.json", "plan.json", "communication/communication.json")
    ]
    path = folder / "report.html"
    body = report_body(name, records, events, _config(folder), *files)
    write_text(path, page(name, [body], "spmdkit report"))
    return path


def report_body(
    name: str,
    records: Sequence[Record],
    events: Sequence[Record],
    config: str | None,
    environment: Record | None,
    plan: Record | None = None,
    communication: Record | None = None,
) -> str:
    """Returns the HTML of all sections, from the content of the run's files."""
    train = [r for r in records if "split" not in r]
    evaluations = [r for r in records if "split" in r]
    body = [
        _heading(name, records, events),
        _summary(train, evaluations, events),
        section("Loss", _chart("loss", train, evaluations, is_large=True)),
        _evaluations(evaluations),
        _other_metrics(train, evaluations),
        _throughput(train),
        plan_section(plan, _finite(train, "step_time_s")) if plan else "",
        communication_section(communication),
        section("Config", f"<pre>{escape(config)}</pre>" if config else paragraph("No config.yaml was found.", "none")),
        section("Environment", _environment_table(environment)),
        section("Events", _timeline(events)),
    ]
    return "\n".join(part for part in body if part)


def _heading(name: str, records: Sequence[Record], events: Sequence[Record]) -> str:
    end = next((e for e in reversed(events) if e.get("event") in TONES), {})  # "saved" does not end a run
    last, is_ok = str(end.get("event", "")), end.get("code") in (None, 0)
    if last == "exited":
        last = f"exited at step {end.get('step')}"
    tone = "bad" if last.startswith("exited") or (TONES.get(last) == "good" and not is_ok) else TONES.get(last, "open")
    last = "finished" if last == "stopped" and is_ok else last
    times = [t for t in (parse_time(e.get("time")) for e in events) if t is not None]
    facts = [counted(max((r["step"] for r in records), default=0), "step")]
    if times:
        facts.append(f"started {_clock_text(min(times))} UTC")
        facts.append(f"{format_duration(max(times) - min(times))} between the first and the last event")
    if end.get("event") == "exited" and end.get("why"):
        facts.append(str(end["why"]))
    return heading(name, [(tone, last)] if last else [], facts)


def _summary(train: Sequence[Record], evaluations: Sequence[Record], events: Sequence[Record]) -> str:
    losses = _points(train, "loss")
    eval_losses = [(s, v) for s, v in _points(evaluations, "loss") if math.isfinite(v)]
    best = min(eval_losses, key=lambda point: point[1], default=None)
    rates = _finite(train, "examples_per_s")
    restarts = sum(e.get("event") == "restored" for e in events if e.get("process", 0) == 0)
    return cards(
        [
            ("final training loss", format_value(losses[-1][1]) if losses else ""),
            ("final evaluation loss", format_value(eval_losses[-1][1]) if eval_losses else ""),
            (f"best evaluation loss, step {best[0]}" if best else "", format_value(best[1]) if best else ""),
            ("examples/s, median", format_rate(statistics.median(rates)) if rates else ""),
            ("times resumed", str(restarts) if restarts else ""),
        ]
    )


def _chart(key: str, train: Sequence[Record], evaluations: Sequence[Record], is_large: bool = False) -> str:
    splits = sorted({str(r["split"]) for r in evaluations})
    series = [Series("train", _points(train, key))]
    for number, split in enumerate(splits, 1):
        points = _points([r for r in evaluations if str(r["split"]) == split], key)
        series.append(Series(split, points, number % NUM_COLORS, has_dots=True))
    series = [s for s in series if s.points]
    draw = partial(line_chart, series, key)
    return legend(series) + (large(draw, 340) if is_large else draw(440, 230))


def _evaluations(evaluations: Sequence[Record]) -> str:
    if not evaluations:
        return section("Evaluations", paragraph("No evaluation was recorded.", "none"))
    names = [n for n in FIRST_KEYS if any(n in r for r in evaluations)]
    names += sorted({k for r in evaluations for k in r} - set(FIRST_KEYS))
    least = min(_finite(evaluations, "loss"), default=None)
    best = [i for i, r in enumerate(evaluations) if least is not None and r.get("loss") == least]
    rows = [[_cell(record.get(n, "")) for n in names] for record in evaluations]
    shown = table({n: KEEP if n == "split" else NUMBER for n in names}, rows, best)
    return section("Evaluations", shown + (paragraph("Highlighted: the lowest evaluation loss.") if best else ""))


def _other_metrics(train: Sequence[Record], evaluations: Sequence[Record]) -> str:
    every = [*train, *evaluations]
    names = sorted({k for r in every for k, v in r.items() if _number(v) is not None} - {*FIRST_KEYS, *LAST_KEYS})
    if not names:
        return ""
    charts = [(name, _chart(name, train, evaluations)) for name in names[:MAX_SMALL_CHARTS]]
    hidden = len(names) - len(charts)
    more = paragraph(f"{hidden} more in metrics.jsonl.") if hidden else ""
    return section("Other metrics", chart_grid(charts) + more)


def _throughput(train: Sequence[Record]) -> str:
    rates, times = _finite(train, "examples_per_s"), _finite(train, "step_time_s")
    if not rates and not times:
        return section("Throughput", paragraph("No throughput was recorded.", "none"))
    waits = [
        w / t
        for w, t in ((_number(r.get("input_wait_s")), _number(r.get("step_time_s"))) for r in train)
        if w is not None and t and math.isfinite(w / t)
    ]
    facts = [
        ("examples/s", _quartiles(rates, format_rate)),
        ("step time", _quartiles(times, format_seconds)),
        ("input wait", f"{min(1.0, statistics.fmean(waits)):.1%} of the step time" if waits else ""),
    ]
    series = Series("examples/s", _points(train, "examples_per_s"))
    chart = large(partial(line_chart, [series], "examples/s"), 220) if rates else ""
    text = paragraph("Compilation, evaluation and saving are excluded.")
    return section("Throughput", fact_table(facts) + chart + text)


def _quartiles(values: Sequence[float], shown: Any) -> str:
    if len(values) < 4:
        return shown(statistics.median(values)) if values else ""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{shown(middle)} median, {shown(low)} to {shown(high)} in the middle half of {len(values)} records"


def plan_section(plan: Mapping[str, Any], step_times_s: Sequence[float]) -> str:
    """Returns the section that compares a plan with measurements, or an empty string if the file is not a plan."""
    peak, limit = (_at(plan, "memory", name) for name in ("peak_bytes", "limit_bytes"))
    if peak is None or limit is None:
        return ""
    sent, predicted = _at(plan, "collective_bytes"), _at(plan, "predicted_step_s")
    times = plan.get("time")
    time = times if isinstance(times, Mapping) else {}
    calibrated = time.get("calibrated")
    facts = [
        ("memory per device", f"{format_bytes(peak)} of {format_bytes(limit)}"),
        ("bytes sent per device and step", "unknown" if sent is None else format_bytes(sent)),
        ("predicted step time", "unknown" if predicted is None else format_seconds(predicted)),
        ("measured step time, median", format_seconds(statistics.median(step_times_s)) if step_times_s else ""),
        ("bound by", time.get("bound")),
        ("rates", f"measured on {calibrated}" if calibrated else "from the chip table"),
    ]
    findings = plan.get("findings")
    rows = "".join(
        f"<p><b>{escape(str(f.get('code')))}</b> {escape(str(f.get('message')))} {code(f.get('source'))}</p>"
        for f in (findings[:20] if isinstance(findings, list) else ())
        if isinstance(f, Mapping)
    )
    return section("Plan", fact_table(facts) + rows)


def _at(plan: Mapping[str, Any], *path: str) -> float | None:
    value: Any = plan
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if (number := _number(value)) is not None and math.isfinite(number) else None


def _environment_table(environment: Record | None) -> str:
    if environment is None:
        return paragraph("No environment.json was found.", "none")
    facts: list[tuple[str, Any]] = []
    for key, value in environment.items():
        if key == "devices" and isinstance(value, list):
            value = ", ".join(_device(d) for d in value)
        elif key == "git" and isinstance(value, dict):
            value = f"{value.get('commit')}{', with uncommitted changes' if value.get('dirty') else ''}"
        elif key == "versions" and isinstance(value, dict):
            value = ", ".join(f"{name} {version}" for name, version in value.items() if version)
        if isinstance(value, dict):
            facts += [(str(name), v) for name, v in value.items()]
        else:
            facts.append((key.replace("_", " "), value))
    return fact_table(facts)


def _device(device: Any) -> str:
    if not isinstance(device, dict):
        return str(device)
    kind, platform = device.get("kind", "?"), device.get("platform", "?")
    return f"{device.get('count', '?')} x {kind}" + ("" if kind == platform else f" ({platform})")


def _timeline(events: Sequence[Record]) -> str:
    if not events:
        return paragraph("No events.jsonl was found, or it is empty.", "none")
    first = next((t for t in (parse_time(e.get("time")) for e in events) if t is not None), None)
    rows = []
    for event in events[-MAX_EVENTS:]:
        at, name = parse_time(event.get("time")), str(event.get("event", "?"))
        since = f"+{format_duration(at - first)}" if at is not None and first is not None else ""
        details = ", ".join(f"{k}: {_cell(v)}" for k, v in event.items() if k not in ("event", "time", "process"))
        moment = _clock_text(at) if at is not None else event.get("time", "")
        rows.append((moment, since, event.get("process", ""), mark(TONES.get(name, ""), name), details))
    hidden = f"The last {len(rows)} of {len(events)} events." if len(events) > len(rows) else ""
    columns = {"time (UTC)": KEEP, "since start": KEEP, "process": WIDE, "event": KEEP, "details": WIDE}
    return table(columns, rows) + (paragraph(hidden) if hidden else "")


def _config(folder: Path) -> str | None:
    try:
        return read_regular(folder / "config.yaml").decode(errors="replace")
    except OSError:
        return None


def _json_object(path: Path) -> Record | None:
    try:
        return json_object(read_regular(path))
    except OSError:
        return None


def _points(records: Sequence[Record], key: str) -> list[tuple[int, float]]:
    pairs = ((r["step"], _number(r.get(key))) for r in records)
    return sorted(((step, value) for step, value in pairs if value is not None), key=lambda point: point[0])


def _finite(records: Sequence[Record], key: str) -> list[float]:
    return [value for _, value in _points(records, key) if math.isfinite(value)]


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: Any) -> float | None:
    """Returns a number of a file as a float; None for other values. Too large for a chart: inf; too small: 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value) if abs(value) > 1 / LARGEST or value != value else 0.0


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return format_value(value) if isinstance(value, float) else str(value)


def _clock_text(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
