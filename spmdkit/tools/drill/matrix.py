"""`spmdkit drill CONFIG --matrix`: one run for each cell (cells.py), and whether each meets the goals.

A run of each number of processes without faults and one that is killed halfway precede the cells. Each cell resumes
a copy of the killed run, so that the fault may be injected while it restores. A cell is written to `cells.jsonl`
when it is done; the next call continues with the rest. The result is `matrix.json` and `matrix.html`.

Goals: no committed step is lost, no process remains, no run hangs, the launcher names the process at fault, a fault is
detected within the timeout of its phase plus a second, and state and metrics are bitwise those of the run without
faults, except for `nan` and `bit-flip`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmdkit.config import Config, load_config
from spmdkit.errors import ConfigError, ExitCode
from spmdkit.faults.injection.fault import CHANGES_RESULTS, CHECKPOINT_FAULTS, PARTITIONS, Fault
from spmdkit.foundation.files import write_json, write_text
from spmdkit.foundation.formatting import counted
from spmdkit.foundation.json_output import print_json
from spmdkit.foundation.timeouts import MATRIX_CELL_S, MATRIX_STORE_SAVE_S, MATRIX_TOLERANCE_S
from spmdkit.metrics.report.drill_matrix import matrix_page
from spmdkit.tools.drill import compare, figures
from spmdkit.tools.drill.cells import Cell, all_cells, not_applicable
from spmdkit.tools.drill.corrupt import newest
from spmdkit.tools.drill.driver import Driver
from spmdkit.tools.drill.job import SPARE_RESTARTS, DrillRequest, report, run_job
from spmdkit.tools.drill.network import network_for
from spmdkit.tools.drill.object_store import ObjectStore, object_store_for
from spmdkit.tools.drill.timeline import InjectionResult

TIMEOUTS = {
    "heartbeat_timeout_s": 6,
    "step_timeout_s": 8,
    "hook_timeout_s": 5,
    "import_timeout_s": 30,
    "compile_timeout_s": 60,
    "restore_timeout_s": 20,
    "save_timeout_s": 8,
    "evaluation_timeout_s": 8,
}
"""Settings of `watchdog` in all runs of the matrix; `key=value` arguments override them."""
NAMED_SHARE = 0.98
MIN_STEPS = 24
"""A run is killed halfway, after two saves; a fault may need eight more steps."""
BLAMES = ("kill", "stop", "hang", "memory", *CHECKPOINT_FAULTS, *PARTITIONS)
"""Kinds after which one process is at fault."""
TIMEOUT_OF = {"import": "import", "restore": "restore", "data": "step", "step": "step", "hook": "hook"}
TIMEOUT_OF |= {"evaluation": "evaluation", "save": "save", "end": "save"}


def run_matrix(request: DrillRequest, patterns: Sequence[str]) -> int:
    """Runs the cells that are not done yet, and prints the result. Returns 0 if all goals are met, otherwise 1.

    Raises:
        ConfigError: the request is invalid, or the folder contains a matrix of other settings.
    """
    limits = [f"watchdog.{name}={seconds}" for name, seconds in TIMEOUTS.items()]
    request = dataclasses.replace(request, overrides=[*limits, *request.overrides])
    config = load_config(request.config, list(request.overrides))
    if (
        config.checkpoint is None
        or config.watchdog is None
        or config.elastic.in_process
        or config.num_steps < MIN_STEPS
    ):
        raise ConfigError(
            f"{request.config}: a matrix needs at least {MIN_STEPS} steps, checkpoints, the watchdog, and "
            "elastic.in_process: false. Set steps, checkpoint: {every_steps: 5} and elastic.in_process=false."
        )
    matrix = Matrix(request, config, all_cells(patterns))
    if not matrix.cells:
        raise ConfigError(f"--cells {' '.join(patterns)}: no cell matches. A name is like kill@steady-state/2.")
    with object_store_for({cell.kind for cell in matrix.left()}) as matrix.store:
        if not matrix.run():
            return int(ExitCode.INTERRUPTED)
    result = matrix.result()
    write_json(matrix.folder / "matrix.json", result)
    write_text(matrix.folder / "matrix.html", matrix_page(result))
    if request.as_json:
        print_json(result)
    else:
        print("\n".join([*summary_lines(result), f"page {matrix.folder / 'matrix.html'}"]))
    return 0 if result["passed"] else int(ExitCode.CHECK_FAILED)


class Matrix:
    """The cells of one config and their folder, `<run_dir>_drill/matrix`. `store`: for cells of `object-store`."""

    store: ObjectStore | None = None

    def __init__(self, request: DrillRequest, config: Config, cells: Sequence[Cell]):
        self._request, self._config, self.cells = request, config, cells
        run_dir = config.resolved_run_dir()
        self.folder = run_dir.with_name(f"{run_dir.name}_drill") / "matrix"
        self._lines = self.folder / "cells.jsonl"
        settings = {"overrides": list(request.overrides), "config": request.config.read_text()}
        path = self.folder / "settings.json"
        if path.exists() and json.loads(path.read_text()) != settings:
            raise ConfigError(f"{self.folder} contains a matrix of other settings. Move the folder, or set run_dir.")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)

    def run(self) -> bool:
        """Runs the missing cells; returns False if a signal stopped it."""
        left = self.left()
        for number, cell in enumerate(left, 1):
            if not self._prepare(cell.num_processes):
                return False
            row = self._run_cell(cell)
            if row is None:
                return False
            with self._lines.open("a") as file:
                file.write(json.dumps(row) + "\n")
            why = "; ".join(row["missed"]) or "ok"
            report(f"{number} of {len(left)}: {cell} ({row['seconds']:.0f} s): {why}")
        return True

    def left(self) -> list[Cell]:
        """Returns the missing cells."""
        done = {row["cell"] for row in self._rows()}
        return [cell for cell in self.cells if str(cell) not in done and not not_applicable(cell, self._config)]

    def _rows(self) -> list[dict[str, Any]]:
        names = set(map(str, self.cells))
        lines = self._lines.read_text().splitlines() if self._lines.exists() else []
        return [row for row in map(json.loads, lines) if row["cell"] in names]

    def _of(self, num: int, name: str) -> Path:
        return self.folder / f"{name}_{num}"

    def _prepare(self, num: int) -> bool:
        """Makes the runs that the cells of `num` processes need: the one without faults, and the interrupted one."""
        half = Fault("kill", 0, self._config.num_steps // 2 + 1)
        for name, faults, expected in (("undisturbed", [], 0), ("interrupted", [half], 128 + int(signal.SIGKILL))):
            folder = self._of(num, name)
            if (folder / "done").exists():
                continue
            shutil.rmtree(folder, ignore_errors=True)
            report(f"{name}, {num} processes, in {folder}")
            driver = Driver(folder / "run", num, faults)
            code = self._run_job(folder / "run", driver, num, 0)
            if driver.stop_signal is not None:
                return False
            if code != expected:
                raise ConfigError(f"{folder}: the run exited with {code}, expected {expected}. See its logs.")
            (folder / "done").touch()
        return True

    def _run_job(self, folder: Path, driver: Driver, num: int, max_restarts: int, *more: str) -> int:
        overrides = [*self._request.overrides, *more]
        request = dataclasses.replace(self._request, num_processes=num, overrides=overrides)
        return run_job(request, self._config, folder, driver, max_restarts)

    def _run_cell(self, cell: Cell) -> dict[str, Any] | None:
        """Returns the row of a cell; None if a signal stopped it."""
        num, folder = cell.num_processes, self.folder / str(cell).replace("/", "-")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._of(num, "interrupted") / "run", folder)
        fault, begin = cell.fault(newest(folder / "checkpoints")), time.monotonic()
        store, settings, checkpoints = self.store if cell.kind == "object-store" else None, [], None
        if store is not None:
            store.upload(folder / "checkpoints", folder.name)
            checkpoints = store.folder(folder.name)
            settings = [f"checkpoint.directory={checkpoints}", f"watchdog.save_timeout_s={MATRIX_STORE_SAVE_S}"]
        with network_for([fault], num) as network, _time_limit(MATRIX_CELL_S) as expired:
            driver = Driver(
                *(folder, num, [fault], self._request.seed), network=network, checkpoints=checkpoints, store=store
            )
            code = self._run_job(folder, driver, num, SPARE_RESTARTS, *settings)
        if driver.stop_signal is not None and not expired.is_set():
            return None
        if store is not None:
            store.download_newest(folder.name, folder)
        row = self._row(cell, driver, code, folder, expired.is_set())
        row["seconds"] = round(time.monotonic() - begin, 1)
        if not row["missed"]:
            shutil.rmtree(folder)
        return row

    def _row(self, cell: Cell, driver: Driver, code: int, folder: Path, hangs: bool) -> dict[str, Any]:
        clean = self._of(cell.num_processes, "undisturbed") / "run"
        injection = driver.injections[0] if driver.injections else None
        figure = figures.injection_row(injection, driver.attempts[0].begin) if injection is not None else {}
        different = "" if code else compare.different_leaf(clean, folder) or compare.different_record(clean, folder)
        end = driver.attempts[-1].end - injection.fired if injection is not None and injection.fired else None
        row = {
            "cell": str(cell),
            **dataclasses.asdict(cell),
            "process": cell.process,
            "detection_s": figure.get("detection_s"),
            "detected_by": figure.get("detected_by"),
            "detection_limit_s": detection_limit_s(injection, self._config.watchdog, cell.num_processes),
            "named": figure.get("named"),
            "named_correctly": named_correctly(injection),
            "exit_code": figure.get("exit_code"),
            "message": figure.get("message"),
            "recovery_s": figure.get("recovery_s") or (None if code or end is None else round(end, 3)),
            "steps_repeated": figure.get("steps_lost") or 0,
            "bitwise_equal": None if code else not different,
            "final_code": code,
            "attempts": len(driver.attempts),
        }
        row["missed"] = missed_goals(row, injection, driver.lost_commits, _remaining(folder), hangs)
        return row

    def result(self) -> dict[str, Any]:
        """Returns the result, as `--json` prints it."""
        rows = self._rows()
        named = [row["named_correctly"] for row in rows if row["named_correctly"] is not None]
        share = sum(named) / len(named) if named else None
        reasons = [(cell, not_applicable(cell, self._config)) for cell in self.cells]
        only_named = [row for row in rows if row["missed"] and row["missed"] != [NOT_NAMED]]
        return {
            "passed": not only_named and (share is None or share >= NAMED_SHARE),
            "config": str(self._request.config),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, jax {jax.__version__}",
            "num_cells": len(rows),
            "named": sum(named),
            "num_named": len(named),
            "bitwise_equal": sum(row["bitwise_equal"] is True for row in rows),
            "detection_s": figures.spread([row["detection_s"] for row in rows if row["detection_s"] is not None]),
            "recovery_s": figures.spread([row["recovery_s"] for row in rows if row["recovery_s"] is not None]),
            "cells": rows,
            "not_applicable": [{"cell": str(cell), "why": why} for cell, why in reasons if why],
        }


NOT_NAMED = "another process was named"


def missed_goals(
    row: Mapping[str, Any],
    injection: InjectionResult | None,
    lost_commits: Sequence[tuple[int, int]],
    remaining: Sequence[int],
    hangs: bool,
) -> list[str]:
    """Returns the goals that a cell misses, each as a reason."""
    if injection is None or injection.failed:
        return [f"not injected: {injection.failed if injection is not None else 'the run finished before'}"]
    kind = injection.fault.kind
    missed = [f"step {saved} was committed, and the run resumed from {step}" for saved, step in lost_commits]
    if hangs:
        missed.append(f"the run took longer than {MATRIX_CELL_S:.0f} s")
    if remaining:
        missed.append(f"processes remained: {', '.join(map(str, remaining))}")
    may_stop = kind == "nan" and row["final_code"] == ExitCode.NOT_FINITE
    if row["final_code"] != 0 and not may_stop:
        missed.append(f"the run exited with {row['final_code']}")
    if row["named_correctly"] is False:
        missed.append(NOT_NAMED)
    limit_s, detection_s = row["detection_limit_s"], row["detection_s"]
    if limit_s is not None and (detection_s is None or detection_s > limit_s + MATRIX_TOLERANCE_S):
        missed.append(f"detected after {'-' if detection_s is None else f'{detection_s:.1f} s'}, limit {limit_s:g} s")
    if row["bitwise_equal"] is False and kind not in CHANGES_RESULTS:
        missed.append("state or metrics differ from the run without faults")
    return missed


def detection_limit_s(injection: InjectionResult | None, timeouts: Any, num_processes: int = 2) -> float | None:
    """Returns the time in which a fault has to be detected; None if its kind has no limit. `timeouts`: the section
    `watchdog` of the config. A hook of a single process has the limit of an evaluation."""
    if injection is None:
        return None
    fault = injection.fault
    if fault.kind in ("kill", "service"):
        return 0.0
    if fault.kind == "hang":
        name = TIMEOUT_OF[fault.phase or "data"]
        name = "evaluation" if name == "hook" and num_processes == 1 else name
        return float(getattr(timeouts, f"{name}_timeout_s"))
    silent = fault.kind in ("stop", "partition", "partition-send")
    return float(timeouts.heartbeat_timeout_s) if silent else None


def named_correctly(injection: InjectionResult | None) -> bool | None:
    """Returns whether the process at fault is named; None if no process is at fault, or nothing ended."""
    if injection is None or injection.exit_code is None:
        return None
    if injection.fault.kind == "service":
        return "coordination service" in injection.message
    if injection.fault.kind == "object-store":
        return "s3://" in injection.message
    if injection.fault.kind not in BLAMES:
        return None
    at_fault = {injection.process}
    if injection.fault.kind == "partition-peer":
        at_fault.add(injection.process + 1)
    return bool(set(injection.named) & at_fault) and len(injection.named) <= len(at_fault)


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """Returns the lines for the terminal."""
    missed = [row for row in result["cells"] if row["missed"]]
    cells = f"{counted(result['num_cells'], 'cell')}, {len(result['not_applicable'])} not applicable"
    named = f"process at fault named in {result['named']} of {result['num_named']}"
    head = f"{cells}; {named}; bitwise equal in {result['bitwise_equal']}"
    lines = [f"{row['cell']}: {'; '.join(row['missed'])}" for row in missed]
    return [head, *lines, "passed" if result["passed"] else f"FAILED: goals missed in {counted(len(missed), 'cell')}"]


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[threading.Event]:
    """Stops the launcher of this process after `seconds`, and sets the event."""
    expired, ended = threading.Event(), threading.Event()

    def stop() -> None:
        if not ended.wait(seconds):
            expired.set()
            for _ in range(2):  # the second signal kills all processes
                os.kill(os.getpid(), signal.SIGTERM)
                ended.wait(10.0)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield expired
    finally:
        ended.set()
        thread.join()


def _remaining(folder: Path) -> list[int]:
    """Returns the live processes of a run (Linux)."""
    word, found = f"run_dir={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if word in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
