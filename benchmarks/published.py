"""Predicted step times of MaxText's own programs against the step times that others have published.

    python benchmarks/published.py compile [--python PYTHON] [--only NAME ...]    programs that are not there yet
    python benchmarks/published.py fit                                          the constants fitted to the runs
    python benchmarks/published.py table                                        writes docs/measured/published.md

The runs are listed in `published.yaml`. `compile` needs the environment of `maxtext/requirements.txt`; it saves each
program as `published/NAME.txt.gz` when it is done, so it continues where it was interrupted. A program that does not
compile within the limit is listed as not measured (`published/NAME.failed`).
"""

import argparse
import contextlib
import functools
import gzip
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "published"
RUNS = ROOT / "benchmarks" / "published.yaml"
LIMIT_S = 1200
PAGE = ROOT / "docs" / "measured" / "published.md"
RESULTS = FOLDER / "results.json"
GRID = {"tpu": [0.7, 0.75, 0.8, 0.85, 0.9, 0.95], "gpu": [0.45, 0.5, 0.55, 0.6, 0.65, 0.7]}
"""Values of the fitted constant at which the step times are computed."""
sys.path.insert(0, str(ROOT))

from benchmarks.maxtext.programs import last_error, parsed
from spmdkit.plan import step_time
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.step_time import predict_time

_KEPT = ("known_trip_count", "async_collective_fusion_config", "gemm_backend_config", "cudnn_fmha_backend_config")
"""Keys of a backend's configuration that the reader uses."""


def published_runs():
    """Returns the runs of the list, with their compiler flags in full."""
    document = yaml.safe_load(RUNS.read_text())
    return [run | {"flags": document["flags"].get(run.get("flags"), "")} for run in document["runs"]]


# ---- programs --------------------------------------------------------------------------------------------------------


def compile_run(run, python, limit_s=LIMIT_S):
    """Compiles one run and saves its program, or the reason why there is none."""
    program, failed = FOLDER / f"{run['name']}.txt.gz", FOLDER / f"{run['name']}.failed"
    if program.exists() or failed.exists():
        return
    FOLDER.mkdir(exist_ok=True)
    settings = run["settings"] | {
        "per_device_batch_size": run["batch_per_device"],
        "max_target_length": run["sequence"],
        "remat_policy": run["remat"],
        **{f"{axis}_parallelism": size for axis, size in run["mesh"].items()},
    }
    if "global_parameter_scale" not in settings:
        settings["model_name"] = run["model"]
    script = ROOT / "benchmarks" / "maxtext" / "compile_step.py"
    with tempfile.TemporaryDirectory() as out:
        command = [python, str(script), out, run["target"], f"--flags={run['flags']}"]
        command += [f"{name}={value}" for name, value in settings.items()]
        try:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            result = subprocess.run(
                command, env=environment, timeout=limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            problem = "" if result.returncode == 0 else last_error(result.stdout)
        except subprocess.TimeoutExpired:
            problem = f"not compiled within {limit_s / 60:.0f} minutes"
        if problem:
            failed.write_text(problem + "\n")
            print(f"{run['name']}: {problem}", flush=True)
            return
        summary, text = json.loads(Path(out, "step.json").read_text()), Path(out, "step.txt").read_text()
    program.write_bytes(gzip.compress(json.dumps(summary).encode() + b"\n" + shortened(text).encode(), 9, mtime=0))
    print(f"{run['name']}: {summary['cpu_s']} CPU s, {program.stat().st_size / 1e6:.2f} MB", flush=True)


def shortened(text):
    """Returns a program without what the reader of `plan` does not use: sources, code of kernels, notes."""
    lines, in_tables = [], False
    for line in text.splitlines():
        if line.startswith("HloModule"):
            line = ", ".join(
                [line.split(",")[0], *re.findall(r"\b(?:is_scheduled|replica_count|num_partitions)=\w+", line)]
            )
        in_tables = (in_tables or line in ("FileNames", "FunctionNames")) and not line.startswith(("%", "ENTRY"))
        if in_tables:
            continue
        lines.append(_shortened_line(line))
    return "\n".join(lines) + "\n"


def _shortened_line(line):
    line = re.sub(r"(?<=\])\{[\d,]*\}|, control-predecessors=\{[^{}]*\}", "", line)
    line = re.sub(r", frontend_attributes=\{(?![^{}]*(?:chain_id|megascale))[^{}]*\}", "", line)
    line = re.sub(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}', "", line)
    start = line.find("backend_config={")
    if start < 0:
        return line
    start += len("backend_config=")
    config, end = json.JSONDecoder().raw_decode(line, start)
    kept = {key: config[key] for key in _KEPT if key in config}
    for notes in (config, config.get("window_config", {}), config.get("custom_call_config", {})):
        kept |= {key: notes[key] for key in ("estimated_cycles", "cost_estimate") if key in notes}
    return line[:start] + json.dumps(kept, separators=(",", ":")) + line[end:]


# ---- predictions -----------------------------------------------------------------------------------------------------


def kind_of(run):
    """Returns the kind of chip: `tpu` or `gpu`."""
    return parse_target(run["target"]).chip.kind


@functools.cache
def program_of(name):
    """Returns (module, bill, devices) of a saved program."""
    header, _, text = gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode().partition("\n")
    return parsed(json.loads(header), text)


def predicted_s(run, constant=None):
    """Returns the predicted step time of a run, with another value of the fitted constant of its kind of chip."""
    target = parse_target(run["target"])
    with with_constant(target, constant) as target:
        return predict_time(target, *program_of(run["name"])).step_s


@contextlib.contextmanager
def with_constant(target, constant):
    """Yields the target with another value of the fitted constant: `CYCLES` (TPU) or the share of the peak that
    products reach (GPU)."""
    if constant is None:
        yield target
    elif target.chip.kind == "gpu":
        chip = target.chip
        yield replace(target, chip=replace(chip, efficiency=replace(chip.efficiency, matmul=constant)))
    else:
        before = step_time.CYCLES
        step_time.CYCLES = constant
        try:
            yield target
        finally:
            step_time.CYCLES = before


def constant_of(kind):
    """Returns the fitted constant as the package has it."""
    return step_time.CYCLES if kind == "tpu" else parse_target("gpu:h100:8").chip.efficiency.matmul


@functools.cache
def curve(name):
    """Returns the predicted step times of a run at the constants of the grid."""
    run = next(run for run in published_runs() if run["name"] == name)
    return [predicted_s(run, constant) for constant in GRID[kind_of(run)]]


def fitted_constant(kind, runs):
    """Returns the constant with the least mean |log(predicted / published)| over runs, by interpolation."""
    grid = GRID[kind]
    steps = [grid[0] + (grid[-1] - grid[0]) * n / 400 for n in range(401)]
    at = lambda run, constant: float(np.interp(constant, grid, curve(run["name"])))
    error = lambda constant: statistics.fmean(abs(math.log(at(run, constant) / run["step_s"])) for run in runs)
    return min(steps, key=error)


def results():
    """Returns name -> predicted seconds, and for a fitted run those of a fit without it, of the runs with a program."""
    measured = [run for run in published_runs() if (FOLDER / f"{run['name']}.txt.gz").exists()]
    found = {}
    for run in measured:
        found[run["name"]] = {"predicted_s": float(f"{predicted_s(run):.5g}")}
        if run["fitted"]:
            others = [r for r in measured if r["fitted"] and kind_of(r) == kind_of(run) and r is not run]
            without = predicted_s(run, fitted_constant(kind_of(run), others))
            found[run["name"]]["left_out_s"] = float(f"{without:.5g}")
    return found


@dataclass(frozen=True)
class Row:
    """One run: predicted seconds, and those of a fit without this run (for a fitted one); None: no program."""

    run: dict
    predicted_s: float | None = None
    left_out_s: float | None = None

    @property
    def error(self):
        """Relative error of the prediction that does not know the run."""
        return (self.left_out_s or self.predicted_s) / self.run["step_s"] - 1


def rows():
    """Returns the runs with the saved results, in the order of the list."""
    saved = json.loads(RESULTS.read_text())
    return [Row(run, **saved.get(run["name"], {})) for run in published_runs()]


def error_bars():
    """Returns kind of chip -> (the error that eight of ten runs do not exceed, in whole percents; number of runs)."""
    measured = [row for row in rows() if row.predicted_s]
    by_kind = {kind: [row.error for row in measured if kind_of(row.run) == kind] for kind in GRID}
    return {kind: (bar(errors), len(errors)) for kind, errors in by_kind.items()}


def bar(errors):
    """Returns the error that eight of ten errors do not exceed, rounded up to a percent."""
    ordered = sorted(abs(error) for error in errors)
    return math.ceil(100 * ordered[math.ceil(0.8 * len(ordered)) - 1] - 1e-9) / 100


# ---- page ------------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Predicted and published step times

`spmdkit plan` predicts the time of a step from the program that the compiler of the machine makes. This page compares
the prediction with step times that others have published. The programs are those of MaxText 0.2.4, compiled with the
settings of the published recipe (`benchmarks/published.yaml`) by the compilers of jax 0.10.2 (libtpu 0.0.42.1, the
CUDA 13 plugin) on a machine without an accelerator. The published runs used older versions of MaxText and of the
compilers.

One constant per maker is fitted: `CYCLES` of `spmdkit/plan/step_time.py` for all TPUs, and the share of the peak
that matrix products reach for all GPUs. *fitted*: the run was used for the fit; its error is that of a fit without it.
*held out*: the run was not used. `make plan-published` compiles the programs again and writes this page.

Only runs of MaxText are in the list, since its program can be compiled again. Runs of marin are programs of Levanter;
the scaling book has estimates, no measured steps.
"""


def page():
    """Returns the page with the table of runs."""
    found = rows()
    lines = [INTRODUCTION]
    for kind in GRID:
        measured = [row for row in found if kind_of(row.run) == kind and row.predicted_s]
        lines += [f"## {kind.upper()}", "", *summary(measured), ""]
        lines += [
            "| run | machine | remat | published s | predicted s | error | |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in found:
            run = row.run
            if kind_of(run) != kind:
                continue
            start = f"| {run['name']} | `{run['target']}` | `{run['remat']}` | {run['step_s']:.3g} |"
            state = "fitted" if run["fitted"] else "held out"
            if row.predicted_s is None:
                lines.append(f"{start} not measured | | {state}: {reason(run)} |")
            else:
                lines.append(f"{start} {row.predicted_s:.3g} | {row.error:+.1%} | {state} |")
        lines.append("")
    changed = sorted({run["changed"] for run in published_runs() if run.get("changed")})
    lines += ["Where a program differs from the published run:", "", *(f"- {text}" for text in changed)]
    return "\n".join(lines).rstrip() + "\n"


def summary(measured):
    """Returns the figures of the runs of one kind of chip, as lines of the page."""
    lines = []
    for state, part in (
        ("fitted, each left out of its fit", [row for row in measured if row.run["fitted"]]),
        ("held out", [row for row in measured if not row.run["fitted"]]),
        ("all", measured),
    ):
        errors = sorted(abs(row.error) for row in part)
        if errors:
            within = sum(error <= 0.12 for error in errors)
            lines.append(
                f"- {state}: {len(errors)} runs, median error {statistics.median(errors):.1%}, "
                f"{within} of {len(errors)} within 12 %, largest {errors[-1]:.1%}"
            )
    return lines


def reason(run):
    """Returns why a run has no program."""
    failed = FOLDER / f"{run['name']}.failed"
    return failed.read_text().strip() if failed.exists() else "not compiled"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("compile", "fit", "table"))
    parser.add_argument("--python", default=str(ROOT / ".venv-maxtext" / "bin" / "python"))
    parser.add_argument("--only", nargs="*", help="names of runs")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    arguments = parser.parse_args()
    if arguments.action == "compile":
        runs = [run for run in published_runs() if not arguments.only or run["name"] in arguments.only]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(lambda run: compile_run(run, arguments.python), runs))
    elif arguments.action == "fit":
        for kind in GRID:
            known = [row.run for row in rows() if row.left_out_s and kind_of(row.run) == kind]
            print(f"{kind}: {fitted_constant(kind, known):.3f} from {len(known)} runs; set: {constant_of(kind):.3f}")
    else:
        RESULTS.write_text(json.dumps(results(), indent=1) + "\n")
        PAGE.write_text(page())
        print(f"wrote {PAGE}. plan/error_bars.py has to state {error_bars()}")


if __name__ == "__main__":
    main()
