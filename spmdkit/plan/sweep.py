"""`plan --sweep KEY=VALUES`: the plans of several values of one key of a config, or of several numbers of devices.

    batch_size=8,16,32    and every other key, with values in YAML: task_args.context=1024,4096  remat=none,full
    batch_size=auto       the largest batch that fits
    devices=16,32,64      with a family as target (tpu:v5p, gpu:h100, a3-megagpu-8g, cpu): strong and weak scaling

Strong scaling has the config's batch on every number of devices, weak scaling the same batch per device as on the
smallest number. With t the step time on n devices, and t0, n0 those of the smallest number:

    efficiency of strong scaling    (t0 n0) / (t n)
    efficiency of weak scaling      t0 / t
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdkit.config import Config, replace_keys
from spmdkit.config.problems import Location
from spmdkit.config.source import parse
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.mesh.chips import CHIPS, GPU_MACHINES, TPU_PRODUCTS
from spmdkit.metrics.report.sweep import Chart
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.points import Point, Row

MAX_COMPILATIONS = 12
FAMILIES = "tpu:v5p, gpu:h100, a3-megagpu-8g, cluster.yaml or cpu"


@dataclass(frozen=True)
class Sweep:
    """What a sweep varies: a dotted key, and its values; `auto` for the largest batch."""

    key: str
    values: tuple[Any, ...]

    @property
    def is_auto(self) -> bool:
        """Whether the largest batch is searched."""
        return self.key == "batch_size" and self.values == ("auto",)


def read_sweep(text: str) -> Sweep:
    """Returns the sweep of `KEY=VALUES`.

    Raises:
        ConfigError: there is no value, or a number of devices is not a number.
    """
    key, equals, raw = (part.strip() for part in text.partition("="))
    values = parse(f"[{raw}]", lambda line: Location(f"--sweep {text}", 0), f"--sweep {text}").value
    if not key or not equals or not values:
        raise ConfigError(f"--sweep {text}: needs KEY=VALUES with values by commas. Try --sweep batch_size=32,64,128.")
    unique = [value for n, value in enumerate(values) if value not in values[:n]]
    is_number = all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in unique)
    if key == "devices" and not is_number:
        raise ConfigError(f"--sweep {text}: devices are numbers of devices. Try --sweep devices=8,16,32.")
    if key == "batch_size" and "auto" in unique and len(unique) > 1:
        raise ConfigError(f"--sweep {text}: auto is the only value if the largest batch is searched. Leave the others.")
    return Sweep(key, tuple(sorted(unique) if key == "devices" else unique))


# ---- values of a key, numbers of devices -----------------------------------------------------------------------------


def points_of(config: Config, sweep: Sweep, target: str | None) -> list[Point]:
    """Returns the points of a sweep with given values.

    Raises:
        ConfigError: the config has no such key, or the target is not a family.
    """
    if sweep.key == "devices":
        return _scaling(config, sweep.values, target or _own_family(config))
    _check_key(config, sweep)
    return [Point(f"{value}", target, {sweep.key: value}, {"value": value}) for value in sweep.values]


def _check_key(config: Config, sweep: Sweep) -> None:
    """Raises ConfigError if no value is valid."""
    problems = list[str]()
    for value in sweep.values:
        try:
            replace_keys(config, {sweep.key: value})
        except ConfigError as error:
            problems.append(str(error))
    if len(problems) == len(sweep.values):
        raise ConfigError(f"--sweep {sweep.key}: {problems[0]}")


def _own_family(config: Config) -> str:
    if isinstance(config.devices, str) and config.devices.startswith("cpu:"):
        return "cpu"
    raise ConfigError(f"--sweep devices needs a family of targets, found no --target. Try --target {FAMILIES}.")


def _scaling(config: Config, counts: Sequence[int], family: str) -> list[Point]:
    points = [Point(f"{n} strong", family_target(family, n), {}, {"value": n, "scaling": "strong"}) for n in counts]
    for n in counts[1:]:
        changes = {"batch_size": _scaled(config, n, counts[0])}
        points.append(Point(f"{n} weak", family_target(family, n), changes, {"value": n, "scaling": "weak"}))
    return points


def _scaled(config: Config, n: int, first: int) -> Any:
    """Returns the batch sizes on `n` devices, with those of the config on `first`. A fraction is refused later."""
    scaled = {step: size * n / first for step, size in config.batch_sizes}
    sizes = {step: int(size) if size == int(size) else size for step, size in scaled.items()}
    return sizes[0] if len(sizes) == 1 else sizes


def family_target(family: str, count: int) -> str:
    """Returns the target with `count` devices of a family.

    Raises:
        ConfigError: the text is not a family, or it has no machine of that size.
    """
    name = family.removeprefix("tpu:").removeprefix("gpu:")
    product = next((product for product, (chip, _) in TPU_PRODUCTS.items() if name in (product, chip)), None)
    if family == "cpu":
        return f"cpu:{count}"
    if name in GPU_MACHINES or family.endswith((".yaml", ".yml")):
        one = parse_target(f"{family}:1")
        return _whole(family, count, one.num_devices)
    if product is not None:
        chip, cores = TPU_PRODUCTS[product]
        return f"{product}-{count * cores / CHIPS[chip].devices_per_chip:g}"
    if name in CHIPS and CHIPS[name].kind == "gpu":
        return f"gpu:{name}:{count}"
    parse_target(family)  # a text that is no target at all has its own message
    raise ConfigError(f"--sweep devices needs a family of targets, found {family}. Try --target {FAMILIES}.")


def _whole(family: str, count: int, per_host: int) -> str:
    if count % per_host:
        raise ConfigError(
            f"--sweep devices={count}: {family} has {per_host} devices a host or slice. Try "
            f"{-(-count // per_host) * per_host}."
        )
    return f"{family}:{count // per_host}"


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of scaling with `efficiency`; None where a plan or that of the smallest number is missing. The
    smallest number is a row of both."""
    first = rows[0]
    both = [*rows, *([first | {"name": first["name"].replace("strong", "weak"), "scaling": "weak"}])]
    t0, n0 = first.get("predicted_step_s"), first["value"]

    def efficiency(row: Row) -> float | None:
        t, n = row.get("predicted_step_s"), row["value"]
        if not t or not t0:
            return None
        return float(t0 * n0 / (t * n) if row["scaling"] == "strong" else t0 / t)

    return sorted(
        (row | {"efficiency": efficiency(row)} for row in both), key=lambda row: (row["scaling"], row["value"])
    )


# ---- the largest batch -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Largest:
    """The result of `batch_size=auto`: the largest size that fits (None: not one), the smallest that does not (None:
    not tried), and all rows in the order in which they were planned."""

    fits: int | None
    fails: int | None
    rows: tuple[Row, ...]


def largest_batch(unit: int, start: int, plan: Callable[[int], Row], most: int = MAX_COMPILATIONS) -> Largest:
    """Returns the largest multiple of `unit` that fits, by bisection on the compiled memory.

    The memory of a step is nearly linear in the batch, so that the line through two plans gives the next size; if that
    does not halve the interval, its middle is next.

    Args:
        unit: what divides each size: shards of the batch, microbatches.
        start: the size after the first, which is `unit`.
        plan: returns the row of a size.
        most: maximum number of compilations; a refused size needs none.
    """
    rows, low, high, size = list[Row](), 0, math.inf, unit
    while True:
        rows.append(plan(size))
        if rows[-1]["status"] == "fits":
            low = size
        else:
            high = size
        num_compiled = sum("peak_bytes" in row for row in rows)
        if low == 0 or high - low <= unit or num_compiled == most or len(rows) == 3 * most:
            break
        following = start // unit * unit if len(rows) == 1 else _following(rows, low, high, unit)
        size = int(min(max(following, low + unit), high - unit))
    return Largest(low or None, None if high == math.inf else int(high), tuple(rows))


def _following(rows: Sequence[Row], low: int, high: float, unit: int) -> int:
    """Returns the size at which the memory reaches the limit on the line through two plans, rounded down: those nearest
    to the limit, or those at the ends of the interval. The middle of the interval, if the memory is not a line, or the
    compiler reports no memory of `high`."""
    needed = {row["value"]: row["peak_bytes"] for row in rows if "peak_bytes" in row}
    limit = next(row["limit_bytes"] for row in rows if "limit_bytes" in row)
    near = sorted(needed, key=lambda size: abs(needed[size] - limit))[:2]
    is_line = (high == math.inf or high in needed) and (len(rows) < 4 or len(rows) % 3)
    for first, second in (pair for pair in (near, [low, high]) if is_line and len(pair) == 2 and pair[1] in needed):
        slope = (needed[int(second)] - needed[int(first)]) / (second - first)
        size = first + (limit - needed[int(first)]) / slope if slope > 0 else high
        if low <= size < high:
            return int(size // unit) * unit
    middle = (low + high) / 2 if high < 4 * low else math.sqrt(low * min(high, 16.0 * low))
    return int(middle // unit) * unit


def describe_largest(largest: Largest, unit: int) -> str:
    """Returns the result as a sentence."""
    if largest.fits is None:
        return f"no batch fits: {unit}, the smallest that the mesh divides, {largest.rows[0]['reason']}"
    found = next(row for row in largest.rows if row["value"] == largest.fits)
    used = f"{format_bytes(found['peak_bytes'])} of {format_bytes(found['limit_bytes'])} a device"
    if largest.fails is None:
        beyond = "no size that does not fit was reached"
    else:
        failed = next(row for row in largest.rows if row["value"] == largest.fails)
        beyond = f"{largest.fails}: {failed['status']}"
        if largest.fails - largest.fits > unit:
            beyond += ", and sizes between them were not tried"
    num_compiled = sum("peak_bytes" in row for row in largest.rows)
    return f"largest batch that fits: {largest.fits} ({used}; {beyond}); {num_compiled} compilations"


# ---- charts ----------------------------------------------------------------------------------------------------------


def charts_of(sweep: Sweep, rows: Sequence[Row]) -> list[Chart]:
    """Returns the charts of a sweep over its values; of rows with a predicted time."""
    drawn = [row for row in rows if row.get("predicted_step_s")]
    values = sorted({row["value"] for row in drawn}) if _is_numeric(drawn) else [row["value"] for row in drawn]
    at = {str(v): v if _is_numeric(drawn) else n for n, v in enumerate(values)}
    ticks = {float(x): text for text, x in at.items()}
    speed = "tokens_per_s" if any(row.get("tokens_per_s") for row in drawn) else "examples_per_s"
    shown: Mapping[str, str] = {speed: speed.replace("_per_s", " per second"), "predicted_step_s": "seconds of a step"}
    if sweep.key == "devices":
        shown = {speed: shown[speed], "efficiency": "efficiency of scaling"}
    else:
        shown = {**shown, "peak_bytes": "GiB of memory per device"}
    names = list(dict.fromkeys(row.get("scaling", "") for row in drawn))
    return [
        Chart(
            label,
            sweep.key,
            {
                name: [
                    (float(at[str(row["value"])]), row[key] / (2**30 if key == "peak_bytes" else 1))
                    for row in drawn
                    if row.get("scaling", "") == name and row.get(key) is not None
                ]
                for name in names
            },
            ticks,
        )
        for key, label in shown.items()
    ]


def _is_numeric(rows: Sequence[Row]) -> bool:
    return all(isinstance(row["value"], int | float) and not isinstance(row["value"], bool) for row in rows)
