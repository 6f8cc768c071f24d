"""The PNG of `spmdkit bench communication`, drawn by matplotlib (extra `plot`): loss over bytes, loss curves, time."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import format_bytes
from spmdkit.metrics.report.chart import LOG_RATIO

INCHES, DPI = (15.0, 4.8), 120


def write(result: Mapping[str, Any], path: Path) -> str:
    """Plots a result. Returns the path of the file, or why there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no PNG: matplotlib is not installed. Try pip install 'spmdkit[plot]'. The page has the plots."
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if not row["refused"]]
    colours = {row["name"]: f"C{number % 10}" for number, row in enumerate(rows)}
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _loss_over_bytes(left, rows, colours)
    _curves(middle, rows, colours)
    _times(right, rows, colours)
    seeds = f"{len(result['seeds'])} seed{'s' * (len(result['seeds']) > 1)}"
    figure.suptitle(f"{result['replicas']} replicas, batch {result['batch_size']}, {result['steps']} steps, {seeds}")
    figure.savefig(path)
    return str(path)


def _loss_over_bytes(axes: Any, rows: list[Any], colours: Mapping[str, str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes a device sends in a step", ylabel="loss reached", title="loss over bytes")
    for row in rows:
        if row["bytes_per_step"] and row["loss_mean"] is not None:
            below, above = row["loss_mean"] - min(row["loss"]), max(row["loss"]) - row["loss_mean"]
            style = {"fmt": "o", "capsize": 3, "color": colours[row["name"]], "label": row["name"]}
            axes.errorbar([row["bytes_per_step"]], [row["loss_mean"]], yerr=[[below], [above]], **style)
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")


def _curves(axes: Any, rows: list[Any], colours: Mapping[str, str]) -> None:
    axes.set(xlabel="step", ylabel="training loss", title="on the way")
    for row in rows:
        axes.plot(*zip(*row["curve"], strict=True), color=colours[row["name"]], linewidth=1.2)
    losses = [loss for row in rows for _, loss in row["curve"]]
    if all(loss > 0 for loss in losses) and max(losses) > LOG_RATIO * min(losses):
        axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _times(axes: Any, rows: list[Any], colours: Mapping[str, str]) -> None:
    axes.set(xlabel="time of a step over that of sum", title="time")
    drawn = [row for row in rows if row["time_over_sum"] is not None][::-1]
    for row in drawn:
        low, high = row["time_interval"] or [row["time_over_sum"]] * 2
        error = [[max(0.0, row["time_over_sum"] - low)], [max(0.0, high - row["time_over_sum"])]]
        axes.barh(row["name"], row["time_over_sum"], xerr=error, capsize=3, color=colours[row["name"]])
    axes.axvline(1.0, color="black", linewidth=0.8)
