"""`spmdkit doctor CONFIG --start`: the seconds from the command to the end of the first step, by what they are spent
on.

A second process trains the first step in a temporary run directory. It records intervals: imports by package, the
phases of the run, and what JAX reports (traces, lowering, compilation, programs from the cache). A moment counts for
the interval that began last. The second process imports this module before it measures, so that it imports no package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdkit.foundation.phase import Phase

Interval = tuple[str, float, float]
"""What happened, from when to when in monotonic seconds."""

_PHASES = {
    "begin": "cluster and devices",
    "import": "task and program",
    "compile": "other work while compiling",
    "restore": "initial state",
    "data": "first batch",
    "step": "first step",
}
_OF_JAX = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower to StableHLO",
    "/jax/core/compile/backend_compile_duration": "compile (XLA)",
    "/jax/compilation_cache/cache_retrieval_time_sec": "load programs from the cache",
}
SMALLEST_S = 0.01
"""Imports of packages that take less are one row."""


def measure_start(config: Path, overrides: Sequence[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns `total_s`, `rows` of what and seconds in the order of time, and `programs`: those that XLA compiled or
    the cache returned, with their seconds.

    Raises:
        ConfigError: the first step cannot be trained; the message contains that of `train`.
    """
    from spmdkit.errors import ConfigError
    from spmdkit.foundation.timeouts import DOCTOR_START_S

    with tempfile.TemporaryDirectory(prefix="spmdkit-start-") as folder:
        out = Path(folder) / "start.json"
        own = [f"run_dir={folder}/run", "log.every_steps=1", "log.progress=plain", "log.trackers=[]"]
        code = (
            "import sys; from spmdkit.tools.start import record_start; record_start(); "
            "from spmdkit.__main__ import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", code, repr(time.monotonic()), str(out), "train", str(config), *overrides, *own]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DOCTOR_START_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"doctor --start: the first step of {config} takes longer than {DOCTOR_START_S:g} s. Measure a smaller "
                "config, for example with steps=1 and a smaller batch_size."
            ) from None
        if not out.exists():
            raise ConfigError(
                f"doctor --start: train {config} ended with code {done.returncode} before its first step: "
                f"{done.stderr.strip()[-600:] or 'no message'}"
            )
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def record_start() -> None:
    """Records from now on; ends the process after the first step. Takes two arguments from `sys.argv`: the time of the
    command in monotonic seconds, and the file of the record."""
    from spmdkit.foundation import phase

    recorder = _Recorder(float(sys.argv.pop(1)), Path(sys.argv.pop(1)))
    sys.meta_path.insert(0, recorder)
    phase.on_change = recorder.change


class _Recorder:
    """Records intervals of the main thread; first in `sys.meta_path`, it finds modules by the other finders."""

    def __init__(self, begun: float, out: Path):
        now = time.monotonic()
        self._out, self._begun = out, begun
        self._intervals: list[Interval] = [("start of Python", begun, now)]
        self._programs: list[tuple[str, float]] = []
        self._current, self._since, self._has_stepped, self._listens = "command line and config", now, False, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec of a module with a loader that is timed."""
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        loader = getattr(spec, "loader", None)
        if (
            loader is not None
            and not isinstance(loader, type)
            and threading.current_thread() is threading.main_thread()
        ):
            label = f"import {name.partition('.')[0]}"
            for method in ("create_module", "exec_module"):
                if hasattr(loader, method):
                    setattr(loader, method, self._timed(getattr(loader, method), label))
        return spec

    def _timed(self, load: Any, label: str) -> Any:
        def timed(of: Any) -> Any:
            begin = time.monotonic()
            try:
                return load(of)
            finally:
                self._intervals.append((label, begin, time.monotonic()))

        return timed

    def change(self, phase: Phase) -> None:
        """Records the end of a phase; after the first step, writes the record and ends the process."""
        self._listen()
        self._has_stepped = self._has_stepped or phase.phase == "step"
        self._intervals.append((self._current, self._since, phase.since))
        is_end = self._has_stepped and phase.phase not in ("step", "data", "waiting")
        self._current, self._since = _PHASES.get(phase.phase, phase.phase), phase.since
        if is_end:
            self._write(phase.since)
            os._exit(0)

    def _listen(self) -> None:
        if not self._listens:
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._event)
            self._listens = True

    def _event(self, event: str, duration_secs: float, **facts: str | int) -> None:
        label = _OF_JAX.get(event)
        if label is None or threading.current_thread() is not threading.main_thread():
            return
        now = time.monotonic()
        self._intervals.append((label, now - duration_secs, now))
        if label == _OF_JAX["/jax/core/compile/backend_compile_duration"]:
            self._programs.append((str(facts.get("fun_name", "")), duration_secs))

    def _write(self, end: float) -> None:
        seconds = exclusive(self._intervals)
        short = {label for label, of in seconds.items() if label.startswith("import ") and of < SMALLEST_S}
        rows = [(label, of) for label, of in seconds.items() if label not in short]
        rows.append(("other imports", sum(seconds[label] for label in short)))
        self._out.write_text(json.dumps({"total_s": end - self._begun, "rows": rows, "programs": self._programs}))


def exclusive(intervals: Iterable[Interval]) -> dict[str, float]:
    """Returns label -> seconds without the intervals inside, in the order of the first beginnings. Intervals are nested
    or disjoint."""
    seconds, open_ones = defaultdict[str, float](float), list[tuple[str, float]]()
    for label, begin, end in sorted(intervals, key=lambda interval: (interval[1], -interval[2])):
        while open_ones and open_ones[-1][1] <= begin:
            open_ones.pop()
        if open_ones:
            outer, limit = open_ones[-1]
            end = min(end, limit)  # clocks are read in turn
            seconds[outer] -= end - begin
        seconds[label] += end - begin
        open_ones.append((label, end))
    return dict(seconds)
