"""`spmdkit plan`: runs the command with its options."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdkit.cluster import detect_cluster, join
from spmdkit.config import Config, batch_unit, load_config, replace_keys, to_short_yaml
from spmdkit.errors import ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.json_output import print_json
from spmdkit.mesh.mesh import resolve, slices
from spmdkit.metrics.report.sweep import Chart, check_png, write_png, write_rows
from spmdkit.plan.compare import as_written, compare, read_plan, show_comparison
from spmdkit.plan.document import Document, problem_of
from spmdkit.plan.machine.calibrate import calibrate, describe, rates_file, with_measured
from spmdkit.plan.machine.target import Target, open_target, parse_target, target_of, with_fake_devices
from spmdkit.plan.planner import PlanProcesses, log, plan_on, planner_on
from spmdkit.plan.points import (
    Point,
    Row,
    fastest_first,
    notes_of,
    plan_points,
    reasons,
    row_of,
    show_rows,
    summary,
    table_of,
)
from spmdkit.plan.prices import Pricing, cost_of, read_prices
from spmdkit.plan.sweep import (
    Largest,
    charts_of,
    describe_largest,
    largest_batch,
    points_of,
    read_sweep,
    with_efficiency,
)
from spmdkit.plan.table import show, show_candidates
from spmdkit.plan.trace import write_trace
from spmdkit.program.saved_step import make_folder


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command.

    Attributes:
        target: see `target.py`; None: the devices that `train` uses.
        as_json: print only one JSON object.
        html: file to write the page to.
        timeline: file for the timeline of an iteration of the longest loop (one layer), or of the step, for Perfetto.
        calibrate: measure this machine first.
        search: search for the fastest mesh that fits.
        search_over: settings that the search varies.
        compile: number of candidates that the search compiles.
        write: file to write the best config to.
        diff: another config or plan to compare with.
        save_compiled: folder to write the compiled step to.
        sweep: `KEY=VALUES`, see sweep.py.
        plot: file to draw the charts of a sweep to.
        tokens: length of a training run, of which time and price are computed.
        prices: file of prices; None: that of the package.
    """

    target: str | None = None
    as_json: bool = False
    html: Path | None = None
    timeline: Path | None = None
    calibrate: bool = False
    search: bool = False
    search_over: str = "mesh"
    compile: int = 8
    write: Path | None = None
    diff: Path | None = None
    save_compiled: Path | None = None
    sweep: str | None = None
    plot: Path | None = None
    tokens: float | None = None
    prices: Path | None = None

    @property
    def targets(self) -> list[str]:
        """The targets of `--target A,B`, each once."""
        return list(dict.fromkeys(name.strip() for name in (self.target or "").split(",") if name.strip()))

    def pricing(self) -> Pricing:
        """Returns the prices, and the length of the training run."""
        if self.tokens is not None and not 0 < self.tokens < 1e18:
            raise ConfigError(f"--tokens is {self.tokens:g}. A run trains on a positive number. Try --tokens 1e12.")
        return Pricing(read_prices(self.prices), self.tokens)


def run_plan(path: Path, overrides: list[str], options: PlanOptions) -> None:
    """Plans a config (or reads a plan), prints the plan, and fails if it does not fit or exceeds the config's budget.

    Raises:
        ConfigError: exit code 78; if a plan does not fit or exceeds the budget, after the plan is printed.
    """
    _check(path, overrides, options)
    if options.sweep is not None:
        _run_sweep(path, overrides, options)
    elif len(options.targets) > 1:
        _run_targets(path, overrides, options)
    elif _is_step(path):
        from spmdkit.plan.external_step import plan_make

        document = plan_make(str(path), options.target).document
        _finish(document, path, options)
    elif options.diff is not None:
        _run_diff(path, options.diff, overrides, options)
    elif path.suffix == ".json":
        document = read_plan(path)
        with as_written(path):
            _print(document, options)
    else:
        config = load_config(path, overrides)
        machine = choose_target(config, options.target)
        if options.calibrate:
            rates = calibrate(machine)
            if not options.as_json:
                print(f"{describe(rates)}\nwritten to {rates_file()}\n")
        document = _run_search(config, machine, options) if options.search else _plan(config, machine, options)
        _finish(document, path, options)


def _plan(config: Config, machine: Target, options: PlanOptions) -> Document:
    if options.save_compiled is not None and machine.chip.kind == "gpu" and not machine.is_here:
        raise ConfigError(
            f"--save-compiled has no effect for {machine.name}: on a GPU, XLA selects kernels by measuring them, and "
            "the plan does not. The target has to be tpu, cpu or here. Leave it out."
        )
    if options.save_compiled is not None:
        make_folder(options.save_compiled)  # before the compilation, which may take minutes
    return plan_on(config, machine, options.save_compiled)


def _run_targets(path: Path, overrides: list[str], options: PlanOptions) -> None:
    """Prints a row for each target, fastest first."""
    subject, pricing = str(path) if _is_step(path) else load_config(path, overrides), options.pricing()
    with PlanProcesses(subject) as processes:
        found = plan_points([Point(name, name, {}, {}) for name in options.targets], processes, pricing)
    rows = fastest_first(found)
    _print_rows("target", rows, {"targets": rows}, [], path, options)


def _run_sweep(path: Path, overrides: list[str], options: PlanOptions) -> None:
    """Prints a row for each value of a sweep, or for each batch size that the search for the largest tried."""
    sweep, config, pricing = read_sweep(options.sweep or ""), load_config(path, overrides), options.pricing()
    if options.plot is not None:
        check_png()
    if sweep.is_auto:
        largest, sentence = _largest_batch(config, options, pricing)
        rows = sorted(largest.rows, key=lambda row: row["value"])
        result: Document = {"largest_batch": largest.fits, "does_not_fit": largest.fails}
    else:
        points, sentence, result = points_of(config, sweep, options.target), "", {}
        with PlanProcesses(config) as processes:
            rows = plan_points(points, processes, pricing)
        rows = with_efficiency(rows) if sweep.key == "devices" else rows
    charts = charts_of(sweep, rows)
    if options.plot is not None and any(chart.points for chart in charts):
        write_png(f"{path.stem}, {sweep.key}", charts, options.plot)
    result |= {"sweep": sweep.key, "points": rows}
    _print_rows(sweep.key, rows, result, charts, path, options, sentence)


def _largest_batch(config: Config, options: PlanOptions, pricing: Pricing) -> tuple[Largest, str]:
    machine = choose_target(config, options.target)
    unit = batch_unit(config, resolve(config.mesh.sizes(), machine.num_devices, slices(machine.devices)))
    with planner_on(config, machine) as (planner, _):

        def plan(size: int) -> Row:
            point = Point(f"{size}", machine.name, {"batch_size": size}, {"value": size})
            row = row_of(point, planner(point.changes), pricing)
            log(summary(row))
            return row

        largest = largest_batch(unit, max(config.largest_batch, 2 * unit), plan)
    return largest, describe_largest(largest, unit)


def _print_rows(
    first: str,
    rows: list[Row],
    result: Document,
    charts: list[Chart],
    path: Path,
    options: PlanOptions,
    sentence: str = "",
) -> None:
    """Prints and writes several plans.

    Raises:
        ConfigError: none fits.
    """
    pricing = options.pricing()
    if options.html is not None:
        notes = [*([sentence] if sentence else []), *reasons(rows), *notes_of(rows, pricing)]
        write_rows(f"plans of {path.stem} by {first}", *table_of(first, rows), charts, notes, options.html)
    if options.as_json:
        print_json({"config": str(path)} | result)
    else:
        show_rows(first, rows, pricing)
        for line in (sentence, options.html, options.plot if charts else None):
            if line:
                print(visible(str(line)))
    if not any(row["status"] == "fits" for row in rows):
        raise ConfigError(f"plan of {path}: none of {len(rows)} plans fits. {sentence or reasons(rows)[0]}")


def _finish(document: Document, path: Path, options: PlanOptions) -> None:
    document = document | {"cost": cost_of(document, options.pricing())}
    _print(document, options)
    if problem := problem_of(document):
        raise ConfigError(f"plan of {path}: {problem}.")


def _is_step(path: Path) -> bool:
    """Returns whether an argument is `file.py:make` or `module:make` instead of a file."""
    return not path.exists() and re.fullmatch(r"[\w./\\-]+:[A-Za-z_]\w*", str(path)) is not None


def _check(path: Path, overrides: list[str], options: PlanOptions) -> None:
    """Rejects options that have no effect together, and a wrong file of prices, before anything is compiled."""
    options.pricing()
    if _is_step(path) and (overrides or options.search or options.write or options.diff or options.calibrate):
        raise ConfigError(
            f"{path} is a function, and takes only --target, --json, --html and --timeline: overrides and the other "
            "options change or compare configs. Leave them out."
        )
    _check_several(path, options)
    for is_set, name in ((options.write is not None, "--write"), (options.search_over != "mesh", "--search-over")):
        if is_set and not options.search:
            raise ConfigError(f"{name} has no effect without --search: it is about what a search finds. Add --search.")
    if options.diff and (options.search or options.calibrate or options.html or options.timeline):
        raise ConfigError(
            "--diff compares two plans and takes no --search, --calibrate, --html or --timeline. Leave them out."
        )
    if path.suffix == ".json" and (overrides or options.search or options.calibrate or options.target):
        raise ConfigError(f"{path} is a plan that was made: nothing about it can change. Give the config instead.")
    if options.compile < 1:
        raise ConfigError(
            f"--compile is {options.compile}. At least one candidate has to be compiled. Try --compile 8."
        )


def _check_several(path: Path, options: PlanOptions) -> None:
    several = [name for name, is_set in (("--sweep", options.sweep), ("--target A,B", options.targets[1:])) if is_set]
    of_one: tuple[Any, ...] = (options.search, options.diff, options.calibrate, path.suffix == ".json")
    if several and (
        any((*of_one, options.write, options.timeline, len(several) > 1)) or (options.sweep and _is_step(path))
    ):
        raise ConfigError(
            f"{several[0]} makes several plans of a config, and takes no --search, --write, --diff, --timeline or "
            f"--calibrate{', and one target' if options.sweep else ''}. Leave them out."
        )
    if options.save_compiled is not None and (several or any(of_one) or _is_step(path)):
        raise ConfigError("--save-compiled writes the step of one plan of a config. Leave the other options out.")
    if options.plot is not None and options.sweep is None:
        raise ConfigError("--plot has no effect without --sweep: it draws its charts. Add --sweep batch_size=32,64.")


def _print(document: Document, options: PlanOptions) -> None:
    if options.html is not None:
        from spmdkit.metrics.report.plan import plan_page

        files.write_requested("--html", options.html, plan_page(document))
    if options.timeline is not None:
        write_trace(document, options.timeline)
    if options.as_json:
        print_json(document)
        return
    show(document)
    for written in (options.html, options.timeline, options.write, options.save_compiled):
        if written is not None:
            print(visible(str(written)))


def make_plan(config: Config, target: str | None = None) -> Document:
    """Returns the plan of a config on a target."""
    return plan_on(config, choose_target(config, target))


def choose_target(config: Config, target: str | None) -> Target:
    """Returns the target with its devices (`open_target`); None and `here` mean the devices that `train` uses."""
    if target is None or target == "here":
        name = config.devices if isinstance(config.devices, str) and config.devices != "auto" else "here"
        return target_of(join(detect_cluster({}), config.devices).devices, name)
    return open_target(parse_target(target))


def _run_search(config: Config, machine: Target, options: PlanOptions) -> Document:
    """Returns the plan of the best candidate; the plan lists all candidates.

    Raises:
        ConfigError: no candidate fits.
    """
    from spmdkit.plan.search.search import search

    machine, _ = with_measured(machine if machine.devices else with_fake_devices(machine))
    search_over = [name.strip() for name in options.search_over.split(",") if name.strip()]
    ranking = search(config, machine, search_over, options.compile, log)
    rows = [candidate.as_json() for candidate in ranking.candidates]
    if ranking.best is None:
        if options.as_json:
            print_json({"target": machine.name, "fits": False, "candidates": rows})
        else:
            show_candidates(rows)
        raise ranking.nothing_fits()
    assert ranking.best.document is not None
    document = ranking.best.document | {"candidates": rows, "num_compiled": ranking.num_compiled}
    if options.write is not None:
        best = replace_keys(config, ranking.best.changes | _devices_of(config, machine))
        head = (
            f"# The best of {len(rows)} candidates for {machine.name}, {ranking.num_compiled} of them compiled "
            f"(spmdkit plan --search, {datetime.datetime.now(datetime.UTC).date()}).\n"
            f"# Predicted: {document['predicted_step_s']:.4g} s a step.\n"
        )
        write_config(best, config, head, options.write)
    return document


def _devices_of(config: Config, machine: Target) -> dict[str, str]:
    """Returns the change of `devices` with which `train` uses the devices of a target."""
    if machine.name.startswith("cpu:"):
        return {"devices": machine.name}
    is_fake = isinstance(config.devices, str) and config.devices.startswith("cpu:")
    return {"devices": "auto"} if is_fake and machine.chip.kind != "cpu" else {}


def write_config(best: Config, config: Config, head: str, path: Path) -> None:
    """Writes a config that a search found for `config`, below comments.

    Raises:
        ConfigError: the file cannot be written.
    """
    same_folder = path.resolve().parent == config.folder.resolve()
    text = to_short_yaml(best, absolute_paths=not same_folder, hide_secrets=True)
    files.write_requested("--write", path, f"{head}{text}")


def _run_diff(path: Path, other: Path, overrides: list[str], options: PlanOptions) -> None:
    read: Callable[[Path, list[str]], Document] = lambda file, own: (
        read_plan(file) if file.suffix == ".json" else make_plan(load_config(file, own), options.target)
    )
    plans = read(path, overrides), read(other, [])
    with as_written(*(file for file in (path, other) if file.suffix == ".json")):
        if options.as_json:
            print_json(compare(*plans))
        else:
            show_comparison(*plans, (str(path), str(other)))
