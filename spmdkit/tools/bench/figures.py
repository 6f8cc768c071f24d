"""The figures of a row: bytes, time and loss relative to `sum`, as plain values for the JSON, the table, the plot and
the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from spmdkit.tools.bench.interleaved import Trained, block_steps, first_lasting, ratios
from spmdkit.tools.bench.programs import Opened

CURVE_POINTS = 100

Figures = dict[str, Any]


def row_figures(opened: Opened, seeds: Sequence[tuple[Trained, Trained]], sum_bytes: float | None) -> Figures:
    """Returns the figures of a row; for a rejected row, its name and the reason.

    Args:
        seeds: for each seed, the trained row and `sum` as trained alternately with it (the row itself, if it was
            trained alone).
        sum_bytes: bytes that a device sends per step under `sum`.
    """
    figures: Figures = {
        "name": opened.row.name,
        "reducer": opened.row.reducer,
        "sync": opened.row.sync,
        "refused": opened.refused or None,
    }
    if opened.program is None or opened.traffic is None:
        return figures
    per_step, notes = opened.traffic["bytes_per_step"], list[str]()
    figures |= opened.traffic
    figures["bytes_over_sum"] = None if per_step is None or not sum_bytes else per_step / sum_bytes
    if per_step is None:
        notes.append("bytes are unknown: the compiled program does not contain the length of a loop")
    figures |= _time(opened, seeds, notes) | _loss(seeds, notes)
    return figures | {"notes": notes}


def _time(opened: Opened, seeds: Sequence[tuple[Trained, Trained]], notes: list[str]) -> Figures:
    program = opened.program
    assert program is not None
    counted = [block.step_s for trained, _ in seeds for block in trained.blocks if block.counts]
    time_ratios = [ratio for trained, partner in seeds if partner is not trained for ratio in ratios(trained, partner)]
    is_sum = opened.row.name == "sum"
    if not counted:
        least = first_lasting(program) + 3 * block_steps(program, seeds[0][0].steps)
        notes.append(
            f"no time: a block is {seeds[0][0].block_steps} steps here, and the first does not count. Try --steps "
            f"{least}"
        )
    elif not time_ratios and not is_sum:
        notes.append("no ratio of time: the memory does not hold this program and sum together")
    return {
        "step_s": statistics.median(counted) if counted else None,
        "time_over_sum": 1.0 if is_sum and counted else statistics.median(time_ratios) if time_ratios else None,
        "time_interval": list(interval(time_ratios)) if time_ratios else None,
        "time_pairs": len(time_ratios),
    }


def _loss(seeds: Sequence[tuple[Trained, Trained]], notes: list[str]) -> Figures:
    losses = [trained.loss for trained, _ in seeds]
    of_steps = ((trained, step, loss) for trained, _ in seeds for step, loss in enumerate(trained.losses, 1))
    if bad := next((x for x in of_steps if not math.isfinite(x[2])), None):
        notes.append(f"the loss is not finite from step {bad[1]} on (seed {bad[0].program.config.seed})")
    return {
        "loss": losses,
        "loss_mean": math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else None,
        "curve": curve([trained.losses for trained, _ in seeds]),
    }


def add_loss_increase(rows: Sequence[Figures]) -> None:
    """Adds `loss_more` to each row: the relative increase of its loss over `sum`, for each seed; and the mean."""
    plain = rows[0]["loss"]
    for row in (row for row in rows if not row["refused"]):
        pairs = list(zip(row["loss"], plain, strict=True))
        usable = all(math.isfinite(a) and math.isfinite(b) and b != 0 for a, b in pairs)
        row["loss_more"] = [(a - b) / abs(b) for a, b in pairs] if usable else None
        row["loss_more_mean"] = math.fsum(row["loss_more"]) / len(pairs) if usable else None


def curve(runs: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """Returns (step, training loss) for plotting: means over intervals of steps and over seeds, each at the last step
    of its interval."""
    size = max(1, len(runs[0]) // CURVE_POINTS)
    ends = range(size, len(runs[0]) + 1, size)
    return [(end, statistics.fmean(loss for run in runs for loss in run[end - size : end])) for end in ends]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median from order statistics (no assumed distribution): the ranks n/2 -+
    0.98 sqrt(n)."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, math.floor(middle - half))], ordered[min(len(ordered) - 1, math.ceil(middle + half))]


def above(rows: Sequence[Mapping[str, Any]], within: float | None) -> list[str]:
    """Returns the names of the rows with a loss above that of `sum` by more than the share `within`, or with a
    non-finite loss."""
    if within is None:
        return []
    trained = [row for row in rows if not row["refused"] and row["name"] != "sum"]
    return [row["name"] for row in trained if row["loss_more_mean"] is None or row["loss_more_mean"] > within]
