"""`tune`: changes one setting after the other, and keeps a change if it is faster.

On devices (`on_devices`), each variant runs in a separate process next to the unchanged config (measure.py), and is
killed at its deadline. Without them (`on_target`), the predicted step times of `plan` are compared. In both cases the
unchanged config wins unless a variant is faster beyond the noise, and at the end the chosen settings are compared with
it once more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spmdkit.config import Config, to_yaml
from spmdkit.errors import ConfigError
from spmdkit.foundation.timeouts import TUNE_LIST_S, TUNE_VARIANT_S
from spmdkit.launch.process import start
from spmdkit.plan.machine.target import Target
from spmdkit.plan.planner import log, planner_on
from spmdkit.plan.search.candidates import variants
from spmdkit.plan.search.search import SAME
from spmdkit.program.opening import task_of

SETTINGS = ("scan", "attention", "compiler", "microbatches", "prefetch", "remat")
"""What `tune` varies, in this order: those that gain most first."""
MEASURE_S = 10.0
"""Time for which a variant is measured next to the unchanged config, after both are compiled."""

Changes = dict[str, Any]
Evaluate = Callable[[Changes, float], dict[str, Any]]
"""(Changes, seconds to measure) -> `refused`, or `ratio`, `low`, `high`, `faster` and the figures of measure.py."""


@dataclass
class Variant:
    """A set of changes, and what was measured.

    Attributes:
        setting: the changed setting; `all` for the last comparison of the chosen settings.
        status: `faster`, `not faster`, `differs` (its loss or gradient), `refused`, `killed` or `no time`.
        changes: dotted keys of the config -> values, those of the settings chosen before included.
        figures: of measure.py, or `ratio` of predicted times.
    """

    setting: str
    name: str
    changes: Changes
    status: str = "no time"
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the row of `tune --json`."""
        return asdict(self)


def on_devices(config: Config, seconds: float) -> tuple[list[Variant], dict[str, Any]]:
    """Returns the variants in the order of their measurements, and the device. The last variant is that of all chosen
    settings.

    Raises:
        ConfigError: the unchanged config does not train.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="spmdkit-tune-") as folder:
        file = Path(folder) / f"{config.source.stem if config.source else 'config'}.yaml"
        file.write_text(to_yaml(config, absolute_paths=True))
        found = _in_process({"config": str(file), "settings": SETTINGS}, TUNE_LIST_S)
        if "refused" in found:
            raise ConfigError(f"tune: the unchanged config cannot be measured: {found['refused']}")
        device = {name: found[name] for name in ("device", "platform", "num")}

        def evaluate(changes: Changes, measure_s: float) -> dict[str, Any]:
            request = {"config": str(file), "changes": changes, "seconds": measure_s}
            return _in_process(request, TUNE_VARIANT_S)

        return _search(found["variants"], evaluate, deadline), device


def on_target(config: Config, target: Target, seconds: float) -> list[Variant]:
    """Returns the variants with their predicted times relative to those of the unchanged config."""
    deadline, task = time.monotonic() + seconds, task_of(config)
    found = variants(config, task, target, [name for name in SETTINGS if name != "prefetch"])
    with planner_on(config, target) as (plan, _):
        unchanged = plan({})
        if isinstance(unchanged, str):
            raise ConfigError(f"tune: the unchanged config has no plan for {target.name}: {unchanged}")

        def evaluate(changes: Changes, _: float) -> dict[str, Any]:
            document = plan(changes)
            if isinstance(document, str):
                return {"refused": document}
            if not document["fits"]:
                return {"refused": "does not fit"}
            times = {"unchanged_s": unchanged["predicted_step_s"], "step_s": document["predicted_step_s"]}
            ratio = times["step_s"] / times["unchanged_s"] if unchanged["fits"] else 0.0
            return {"ratio": ratio, "high": ratio, "faster": ratio < 1 / SAME, "same": True, **times}

        return _search(found, evaluate, deadline, confirm=False)


def _search(
    of_settings: Mapping[str, Sequence[Mapping[str, Any]]], evaluate: Evaluate, deadline: float, confirm: bool = True
) -> list[Variant]:
    """Returns all variants, evaluated in turn. Each setting starts from the best of those before it, and has to be
    faster than that beyond the noise."""
    tried, chosen = list[Variant](), Variant("", "unchanged", {}, figures={"ratio": 1.0})
    for setting, rows in of_settings.items():
        winner = chosen
        for row in rows:
            variant = Variant(setting, row["name"], {**chosen.changes, **row["changes"]})
            tried.append(variant)
            if row["refused"]:
                variant.status, variant.reason = "refused", row["refused"]
            elif time.monotonic() < deadline:
                _evaluate(variant, evaluate, MEASURE_S)
                is_new = variant.status == "faster" and variant.figures["high"] < chosen.figures["ratio"]
                if is_new and variant.figures["ratio"] < winner.figures["ratio"]:
                    winner = variant
        chosen = winner
    if chosen.changes:
        last = Variant("all", ", ".join(_names(tried, chosen)), chosen.changes)
        if confirm:
            _evaluate(last, evaluate, 2 * MEASURE_S)
        else:
            last.status, last.figures = chosen.status, chosen.figures
        tried.append(last)
    return tried


def _names(tried: Sequence[Variant], chosen: Variant) -> list[str]:
    """Returns the names of the variants of which the chosen settings consist."""
    parts = [v for v in tried if v.status == "faster" and v.changes.items() <= chosen.changes.items()]
    return list({v.setting: v.name for v in parts}.values())


def _evaluate(variant: Variant, evaluate: Evaluate, measure_s: float) -> None:
    figures = evaluate(variant.changes, measure_s)
    if "refused" in figures:
        variant.status, variant.reason = figures.get("status", "refused"), figures["refused"]
    else:
        variant.figures = figures
        variant.status = "not faster" if not figures["faster"] else "faster" if figures["same"] else "differs"
    shown = f" {figures['ratio']:.3f}" if "ratio" in figures else f": {variant.reason}"
    log(f"{variant.setting}: {variant.name}: {variant.status}{shown}")


def _in_process(request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Returns the result of a measuring process, which is killed at its deadline."""
    command = [sys.executable, "-m", "spmdkit.tools.tune.measure", json.dumps(request)]
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=max(1.0, timeout_s))
    except subprocess.TimeoutExpired:
        return {"refused": f"no result after {timeout_s:.0f} s", "status": "killed"}
    finally:
        process.kill()
        process.communicate()
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError:
        lines = [line for line in errors.splitlines() if line.strip()]
        return {"refused": lines[-1] if lines else f"its process ended with code {process.returncode}"}
    return result
