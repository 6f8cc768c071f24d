"""`search`: the fastest mesh that fits. A model orders all legal candidates; the best are compiled.

Each compilation is a separate process (`spmdkit plan ... --json`): as many concurrently as there are cores, at most
four. A crash of the compiler rejects only its candidate. On a local accelerator, candidates are compiled sequentially
in this process, since a second process could not allocate memory. The reported time is the prediction from the compiled
program, never the model's estimate.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spmdkit.config import Config, replace_keys, to_yaml
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.timeouts import PLAN_WORKER_S
from spmdkit.launch.process import start
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.compiler_process import compiler_environment
from spmdkit.plan.machine.target import Target
from spmdkit.plan.search.candidates import Candidate, candidates
from spmdkit.program.opening import task_of
from spmdkit.program.program import Program

MAX_WORKERS = 4
Log = Callable[[str], None]


@dataclass(frozen=True)
class Ranking:
    """The result of a search: candidates, best first, and the number of compiled ones."""

    candidates: tuple[Candidate, ...]
    num_compiled: int

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that fits, or None."""
        return next((candidate for candidate in self.candidates if candidate.status == "best"), None)

    def nothing_fits(self) -> ConfigError:
        """Returns the error of a search in which no candidate fits; it names the nearest."""
        compiled = [c for c in self.candidates if c.document is not None]
        nearest = min(compiled, key=lambda c: c.document["memory"]["peak_bytes"], default=None)  # type: ignore[index]
        smallest = f" The smallest is {nearest.name}: {nearest.reason}." if nearest is not None else ""
        return ConfigError(
            f"--search found nothing that fits among {len(self.candidates)} candidates, {self.num_compiled} of them "
            f"compiled.{smallest} A step has to fit. Vary more (--search-over mesh,microbatches,remat), compile more "
            "(--compile), or take more devices."
        )


def search(
    config: Config, target: Target, search_over: Sequence[str], most_compiled: int, report: Log, call_s: float = 0.0
) -> Ranking:
    """Returns the candidates of a config on an opened target, compiled and ranked.

    Args:
        search_over: settings of `candidates.VARIED`; settings that the config leaves `auto` also vary.
        most_compiled: maximum number of candidates to compile.
        report: called with a line of progress.

    Raises:
        ConfigError: a search cannot vary the named setting, or no mesh is legal.
    """
    task = task_of(config)
    all_candidates = candidates(config, task, target, search_over)
    legal = [c for c in all_candidates if c.estimate_s is not None]
    report(f"{len(all_candidates)} candidates, {len(legal)} legal; compiling the best {min(most_compiled, len(legal))}")
    in_process = target.is_here and target.chip.kind != "cpu"
    plan = _in_process(config, task, target, call_s) if in_process else _Planner(config, target)
    workers = 1 if in_process else max(1, min(MAX_WORKERS, os.cpu_count() or 1))
    chosen = legal[:most_compiled]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for done in [pool.submit(_compile, candidate, plan, report) for candidate in chosen]:
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(plan, _Planner):
                plan.close()
    for candidate in legal[most_compiled:]:
        candidate.reason = (
            f"the model puts it behind the {most_compiled} that were compiled ({candidate.estimate_s:.3g} s)"
        )
    return Ranking(_rank(all_candidates), len(chosen))


def _rank(all_candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Returns the candidates best first: by predicted time if they fit, then by status and estimate."""
    fitting = sorted((c for c in all_candidates if c.status == "fits"), key=_predicted)
    if fitting:
        fitting[0].status = "best"
        fastest = _predicted(fitting[0])
        fitting[0].reason = "the shortest predicted step of those that fit"
        for candidate in fitting[1:]:
            candidate.reason = f"fits; {_predicted(candidate) / fastest:.2f} times the best step"
    order = {"does not fit": 1, "not compiled": 2, "refused": 3}
    rest = sorted((c for c in all_candidates if c not in fitting), key=lambda c: (order[c.status], c.estimate_s or 1e9))
    return (*fitting, *rest)


def _predicted(candidate: Candidate) -> float:
    return candidate.document["predicted_step_s"] if candidate.document else float("inf")


def _compile(candidate: Candidate, plan: Callable[[Candidate], dict[str, Any] | str], report: Log) -> None:
    result = plan(candidate)
    predicted = ""
    if isinstance(result, str):
        candidate.status, candidate.reason = "refused", result
    else:
        candidate.document, memory = result, result["memory"]
        candidate.status = "fits" if result["fits"] else "does not fit"
        needed, limit = (format_bytes(memory[name]) for name in ("peak_bytes", "limit_bytes"))
        candidate.reason = f"needs {needed} of {limit} a device"
        predicted = f", {_predicted(candidate):.3g} s" if result["fits"] else ""
        if result["fits"] and (exceeded := result["budget"]["exceeded"]):
            candidate.status, candidate.reason = "refused", "; ".join(exceeded)
    report(f"{candidate.name}: {candidate.status}{predicted}")


def _in_process(
    config: Config, task: Any, target: Target, call_s: float
) -> Callable[[Candidate], dict[str, Any] | str]:
    def plan(candidate: Candidate) -> dict[str, Any] | str:
        try:
            return plan_program(Program(replace_keys(config, candidate.changes), task, target.devices), target, call_s)
        except (SpmdkitError, jax.errors.JaxRuntimeError) as error:
            return str(error).splitlines()[0]

    return plan


class _Planner:
    """Plans a candidate in a separate process."""

    def __init__(self, config: Config, target: Target):
        self._folder = tempfile.TemporaryDirectory(prefix="spmdkit-search-")
        self._file = Path(self._folder.name) / f"{config.source.stem if config.source else 'config'}.yaml"
        self._file.write_text(to_yaml(config, absolute_paths=True))
        self._target = target
        self._environment = compiler_environment() if target.compiler == "gpu" else None
        self._running: set[subprocess.Popen[str]] = set()

    def __call__(self, candidate: Candidate) -> dict[str, Any] | str:
        overrides = [f"{key}={json.dumps(value)}" for key, value in candidate.changes.items()]
        command = [sys.executable, "-m", "spmdkit", "plan", str(self._file), *overrides, "--json"]
        command += ["--target", self._target.name]
        process = start(command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._running.add(process)
        try:
            out, errors = process.communicate(timeout=PLAN_WORKER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"its compilation took longer than {PLAN_WORKER_S} s"
        finally:
            self._running.discard(process)
        try:
            plan: dict[str, Any] = json.loads(out)
            return plan
        except ValueError:
            lines = [line for line in errors.splitlines() if line.strip()]
            return lines[-1] if lines else f"the compiler ended with code {process.returncode}"

    def close(self) -> None:
        """Terminates running processes and removes the folder."""
        for process in list(self._running):
            process.kill()
        self._folder.cleanup()
