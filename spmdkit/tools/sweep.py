"""`spmdkit sweep` and `sk.sweep`: every combination of some values of a config, a process for each run.

A sweep has a directory, `runs/<config name>_sweep`: a run's directory for each combination, `logs/` with the output of
the processes, `sweep.json` and `sweep.html` with one row per run. The same command continues a sweep: finished runs are
not started, and the others resume.

Every combination is checked before the first process starts. Nothing is searched: tools such as Optuna choose the
values, and call `sk.train`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.config import Config, load_config, to_yaml
from spmdkit.config.problems import Location
from spmdkit.config.source import parse
from spmdkit.config.task import IN_PYTHON
from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import MEASURED
from spmdkit.foundation.files import write_json, write_text
from spmdkit.foundation.formatting import counted, new_table
from spmdkit.metrics import read_lines
from spmdkit.metrics.report.chart import Series, legend, line_chart
from spmdkit.metrics.report.page import (
    NUM_COLORS,
    NUMBER,
    WIDE,
    code,
    heading,
    large,
    page,
    section,
    table,
)

MAX_RUNS = 1000
MAX_NAME = 80
MAX_CURVES = 12

Row = dict[str, Any]


class SweepRun(NamedTuple):
    """One run: its settings, the arguments of `train`, and its config."""

    settings: Mapping[str, Any]
    overrides: tuple[str, ...]
    config: Config

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return self.config.resolved_run_dir()


def sweep(
    config: Config | str | os.PathLike[str], values: Mapping[str, Sequence[Any]], max_parallel: int = 1
) -> list[Row]:
    """Trains every combination of `values`, and returns a row for each: its settings, `run_dir`, `exit_code`, `step`,
    the metrics of the last log step, and those of the last evaluation as `eval/NAME`.

    `pandas.DataFrame(sk.sweep("run.yaml", {"learning_rate": [1e-3, 3e-3], "seed": [0, 1]}))` is a table.

    Args:
        config: the path of a config, or a `Config` with a task that a process can import.
        values: dotted key -> its values.
        max_parallel: processes at a time. All use the devices that the config names.

    Raises:
        ConfigError: a combination is not a valid config; raised before the first run.
    """
    file = _file_of(config) if isinstance(config, Config) else Path(config)
    texts = {key: [json.dumps(value) for value in each] for key, each in values.items()}
    return run_sweep(file, [f"{key}={','.join(each)}" for key, each in texts.items()], max_parallel)


def _file_of(config: Config) -> Path:
    """Returns a file with the settings of a config."""
    if config.task == IN_PYTHON:
        raise ConfigError(
            "a sweep starts a process for each run, and the config names no task that a process can import. Write the "
            "task into a file: sk.Config(task='my_task.py:task', ...)."
        )
    directory = _directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "config.yaml", to_yaml(config, absolute_paths=True, hide_secrets=True))
    return directory / "config.yaml"


def _directory(config: Config) -> Path:
    base = config.resolved_run_dir()
    return base.with_name(f"{base.name}_sweep")


def run_sweep(file: Path, arguments: Sequence[str], max_parallel: int = 1) -> list[Row]:
    """Trains every combination of `KEY=VALUE,VALUE` arguments; returns a row for each and writes the page."""
    runs = list(_runs(file, [_values(text) for text in arguments]))
    directory = runs[0].directory.parent
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    start = lambda run: _train(file, run, directory / "logs" / f"{run.directory.name}.txt", processes)
    with ThreadPoolExecutor(max(1, max_parallel)) as pool:
        try:
            codes = list(pool.map(start, runs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.send_signal(signal.SIGTERM)  # it saves; the same command continues
            raise
    rows = [_row(run, code_) for run, code_ in zip(runs, codes, strict=True)]
    write_json(directory / "sweep.json", rows)
    write_text(directory / "sweep.html", sweep_page(directory.name, runs, rows))
    return rows


def _values(text: str) -> tuple[str, list[Any]]:
    key, equals, raw = (part.strip() for part in text.partition("="))
    where = f"sweep {text[:100]}"
    values = parse(f"[{raw}]", lambda _line: Location(where, 0), where).value if equals else None
    if not key or not values:
        raise ConfigError(f"{where}: needs KEY=VALUES, with values by commas. Try learning_rate=1e-3,3e-3.")
    return key, values


def _runs(file: Path, named: Sequence[tuple[str, list[Any]]]) -> Iterator[SweepRun]:
    """Yields the runs. Raises ConfigError for a combination that is not a valid config."""
    num = 1
    for _, values in named:
        num *= len(values)
    if num > MAX_RUNS:
        raise ConfigError(f"sweep of {num} runs: at most {MAX_RUNS} are started. Sweep fewer values.")
    directory = _directory(load_config(file, [f"{key}={json.dumps(values[0])}" for key, values in named]))
    varied = [key for key, values in named if len(values) > 1]
    for combination in itertools.product(*(values for _, values in named)):
        settings = dict(zip((key for key, _ in named), combination, strict=True))
        full = ",".join(f"{key}={settings[key]}" for key in varied) or "run"
        name = re.sub(r"[^\w.=,+-]", "_", full)[:MAX_NAME]
        if name != full:
            name = f"{name}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
        overrides = (*(f"{k}={json.dumps(v)}" for k, v in settings.items()), f"run_dir={directory / name}")
        yield SweepRun({key: settings[key] for key in varied}, overrides, load_config(file, overrides))


def _train(file: Path, run: SweepRun, log: Path, processes: list[subprocess.Popen[bytes]]) -> int:
    """Returns the exit code of a run, which is not started again if it has finished with the same config."""
    stored, ends = log.with_suffix(".yaml"), [e for e in read_lines(run.directory / "events.jsonl") if "code" in e]
    expected = to_yaml(run.config, absolute_paths=True, hide_secrets=True, keep_references=True)
    is_done = bool(ends) and ends[-1].get("event") == "stopped" and ends[-1]["code"] == 0
    if is_done and stored.is_file() and stored.read_text() == expected:
        return 0
    command = [sys.executable, "-m", "spmdkit", "train", str(file), *run.overrides]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        processes.append(process)
        code = process.wait()
    if code == 0:
        write_text(stored, expected)  # config.yaml of the run has steps in place of epochs
    return code


def _row(run: SweepRun, exit_code: int) -> Row:
    lines = read_lines(run.directory / "metrics.jsonl")
    trained: Row = next((line for line in reversed(lines) if "split" not in line), {})
    evaluated: Row = next((line for line in reversed(lines) if line.get("split") == "eval"), {})
    last = {f"eval/{name}": x for name, x in evaluated.items() if name not in ("split", "step")}
    metrics = {name: x for name, x in (trained | last).items() if name not in run.settings}
    return {**run.settings, "run_dir": str(run.directory), "exit_code": exit_code, **metrics}


def print_table(rows: Sequence[Row]) -> None:
    """Prints the settings, the exit code and the losses of each run, and where the page is."""
    from rich.console import Console

    columns = [key for key in _shown_columns(rows) if key != "run_dir"]
    lines = new_table(*columns, right=range(len(columns)))
    for row in rows:
        lines.add_row(*(_text(row.get(key)) for key in columns))
    Console(highlight=False, soft_wrap=True).print(lines)
    print(Path(rows[0]["run_dir"]).parent / "sweep.html")


def _shown_columns(rows: Sequence[Row]) -> list[str]:
    every = list(dict.fromkeys(key for row in rows for key in row))
    hidden = (*MEASURED, "epoch", "gradient_norm")
    return [key for key in every if key not in hidden and not all(isinstance(r.get(key), dict | list) for r in rows)]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def sweep_page(name: str, runs: Sequence[SweepRun], rows: Sequence[Row]) -> str:
    """Returns the page of a sweep: a row for each run, and the loss of the first runs."""
    columns = sorted(_shown_columns(rows), key="run_dir".__eq__)  # paths last
    shown = [[code(row[c]) if c == "run_dir" else _text(row.get(c)) for c in columns] for row in rows]
    series = []
    for number, run in enumerate(runs[:MAX_CURVES]):
        lines = read_lines(run.directory / "metrics.jsonl")
        points = [
            (line["step"], line["loss"])
            for line in lines
            if "split" not in line and isinstance(line.get("loss"), float)
        ]
        series.append(Series(run.directory.name, points, number % NUM_COLORS))
    kinds = {c: NUMBER if any(isinstance(row.get(c), float | int) for row in rows) else WIDE for c in columns}
    body = [heading(name, [], [counted(len(rows), "run")]), section("Runs", table(kinds, shown))]
    if any(s.points for s in series):
        body.append(section("Loss", legend(series) + large(partial(line_chart, series, "loss"), 340)))
    return page(name, body, "spmdkit sweep")
