"""The train step on one GPU: quick tests, the plan next to measured steps and memory, MFU, and torch.compile.

    python benchmarks/gpu.py [--torch PYTHON] [--seconds 480] [--again] [--only ITEM ...] [--cpu]

Needs no network. Runs the items in order of value and saves each when it is measured; stops after `--seconds`. The next
call skips the measured items and continues with the one that was stopped. Items that failed are last.

    tests           pytest tests/examples/test_accelerator.py on the GPU
    spmdkit/MODEL   the loop of `train`: tokens/s, and the plan of its step by the GPU's compiler. MFU is the rate of
                    the products (`Model.flops` of peers/models.py) over that of the data sheet, and over that of a
                    bfloat16 product of width 8,192 in the same process
    torch/MODEL     the same model, rows and AdamW by torch.compile with SDPA and fused AdamW

Compute is bfloat16, parameters are float32. Both frameworks draw their parameters from the same distributions, not with
the same numbers: the losses of the first step differ by less than 2 %. Processes run one after the other, since two
models of 1.3B do not fit together.

Without a GPU, or with --cpu, the same items run with a tiny model, and the rows are saved to build/gpu. Otherwise they
are in benchmarks/results/gpu.json. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

import results
from models import GPU_MODELS
from worker import SIGN

ROUNDS = 6
"""Blocks of steps of an item; the first is not counted."""
SIZES = ("gpt_124m", "gpt_350m", "gpt_1300m")
GOALS = {"MFU": ("gpt_1300m", 0.60), "tokens/s, of torch": (None, 1.05)}
"""Column -> (model, None: each; least value)."""
TOLERANCE = 0.02
"""Of the relative difference of the losses of the first step."""

Row = dict[str, Any]
Run = Callable[[str, float], Row]


class Stopped(Exception):
    """The time is over before the item has ended."""


def items_of(is_cpu: bool) -> list[str]:
    """Returns the items in order of value."""
    sizes = ("gpt_tiny",) if is_cpu else SIZES
    return ["tests", *(f"spmdkit/{size}" for size in sizes), *(f"torch/{size}" for size in sizes)]


ORDER = [*items_of(False), *items_of(True)[1:]]


def pending(items: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Returns the items without a result: first those that were not measured, then those that failed."""
    status = {row["item"]: row["status"] for row in rows}
    return [i for i in items if i not in status] + [i for i in items if status.get(i, "ok") != "ok"]


def measure(
    items: Sequence[str], rows: list[Row], run: Run, save: Callable[[list[Row]], None], end: float
) -> list[str]:
    """Measures the pending items until the time `end` of the monotonic clock, and saves the rows after each.

    Args:
        rows: of earlier calls; changed in place.
        run: returns the row of an item from the item and the seconds left; raises Stopped.
        save: writes the rows.

    Returns:
        The items that are left.
    """
    budget = end - time.monotonic()
    for item in pending(items, rows):
        if (left := end - time.monotonic()) <= 0:
            break
        try:
            row = run(item, left)
        except Stopped:
            if left < 0.9 * budget:  # the next call starts with it
                break
            row = {"status": f"no result in {left:.0f} s"}
        rows[:] = [old for old in rows if old["item"] != item] + [{"item": item, "status": "ok"} | row]
        rows.sort(key=lambda row: ORDER.index(row["item"]))
        compare(rows)
        save(rows)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return pending(items, rows)


def compare(rows: Sequence[Row]) -> None:
    """Adds to the rows of spmdkit their ratio to torch, and whether they meet the goals."""
    by_item = {row["item"]: row for row in rows if row["status"] == "ok"}
    for item, row in by_item.items():
        framework, _, model = item.partition("/")
        if framework != "spmdkit":
            continue
        if theirs := by_item.get(f"torch/{model}"):
            row["tokens/s, of torch"] = row["tokens/s"] / theirs["tokens/s"]
            different = abs(theirs["loss"] / row["loss"] - 1)
            row["comparable"] = "yes" if different < TOLERANCE else f"losses differ by {different:.1%}"
        goals = [
            f"{column} {least:.2f} {'met' if row[column] >= least else 'missed'}"
            for column, (of, least) in GOALS.items()
            if of in (None, model) and row.get(column) is not None
        ]
        row["goals"] = ", ".join(goals)


# ---- items


def runner(is_cpu: bool, torch: str | None) -> Run:
    """Returns the function that runs an item in a process on the GPU, or on the CPU."""
    platform = "cpu" if is_cpu else "cuda,cpu"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "JAX_PLATFORMS": platform,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "SPMDKIT_TEST_PLATFORMS": platform,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),  # the tests set flags that are for CPUs only
    }

    def run(item: str, left_s: float) -> Row:
        framework, _, model = item.partition("/")
        if item == "tests":
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/examples/test_accelerator.py"]
            code, output = execute(command, "", left_s, environment)
            return {"status": "ok" if code == 0 else "failed", "tests": (output.strip().splitlines() or [""])[-1]}
        if framework == "torch" and torch is None:
            return {"status": "torch is not installed"}
        python, script, mode = (
            (sys.executable, "spmdkit_worker.py", "gpu")
            if framework == "spmdkit"
            else (torch, "torch_worker.py", "gpu-compile")
        )
        command = [str(python), str(HERE / "peers" / script), model, "1", mode]
        code, output = execute(command, f"{GPU_MODELS[model].steps}\n" * ROUNDS, left_s, environment)
        found = [json.loads(line.removeprefix(SIGN)) for line in output.splitlines() if line.startswith(SIGN)]
        if code or len(found) != ROUNDS + 1:
            return {"status": f"failed: {(output.strip().splitlines() or [f'exit code {code}'])[-1][:200]}"}
        return figures(model, found[0], found[2:])

    return run


def execute(command: Sequence[str], text: str, left_s: float, environment: Mapping[str, str]) -> tuple[int, str]:
    """Returns (exit code, output and errors) of a command with `text` as input. After `left_s` it and its processes are
    killed; raises Stopped."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=results.ROOT,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(text, left_s)
    except subprocess.TimeoutExpired:
        raise Stopped from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    return child.returncode, output


def figures(model: str, started: Mapping[str, Any], blocks_s: Sequence[float]) -> Row:
    """Returns the row of a worker from what it reported at its start, and the seconds of its blocks."""
    sizes = GPU_MODELS[model]
    step_s = statistics.median(blocks_s) / sizes.steps
    rate = sizes.flops / step_s
    gib = lambda num: None if num is None else num / 2**30
    row = {
        "tokens/s": sizes.tokens / step_s,
        "step, ms": 1e3 * step_s,
        "TFLOP/s": rate / 1e12,
        "peak, GiB": gib(started["peak_bytes"]),
        "loss": started["losses"][0],
        "loss, fifth step": started["losses"][-1],
        "versions": ", ".join(f"{package} {version}" for package, version in started["versions"].items()),
    }
    if "predicted_s" in started:
        row |= {
            "step of the plan, ms": 1e3 * started["predicted_s"],
            "step, plan / measured": started["predicted_s"] / step_s,
            "peak of the plan, GiB": gib(started["predicted_bytes"]),
            "MFU": rate / started["datasheet_flops_per_s"],
            "MFU, of the product": rate / started["product_flops_per_s"],
        }
    return row


def gpu_name() -> str | None:
    """Returns the name of the first GPU of this machine, None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return (done.stdout.strip().splitlines() or [None])[0] if done.returncode == 0 else None


def python_with_torch() -> str | None:
    """Returns a Python of this machine that imports torch, None without one."""
    for python in filter(None, (sys.executable, shutil.which("python3"))):
        if subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=120).returncode == 0:
            return python
    return None


def main() -> None:
    """Continues with the items that are left, and prints one JSON line."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="Python of an environment with torch; default: one of this machine")
    parser.add_argument("--seconds", type=float, default=480.0, help="limit of this call")
    parser.add_argument("--again", action="store_true", help="measure the items again that are measured")
    parser.add_argument("--only", nargs="*", metavar="ITEM", help="items; default: all")
    parser.add_argument("--cpu", action="store_true", help="the tiny model on the CPU")
    parser.add_argument("--folder", type=Path, help="of gpu.json; default: benchmarks/results, on a CPU build/gpu")
    options = parser.parse_args()
    name = None if options.cpu else gpu_name()
    items = items_of(name is None)
    if unknown := [item for item in options.only or () if item not in items]:
        parser.error(f"--only {' '.join(unknown)}: the items are {', '.join(items)}")
    items = [item for item in items if options.only is None or item in options.only]
    folder = options.folder or (results.FOLDER if name else results.ROOT / "build" / "gpu")
    path, note = folder / "gpu.json", f"Device: {name or 'CPU'}."
    saved = json.loads(path.read_text()) if path.exists() else {}
    rows = saved["rows"] if saved.get("note") == note else []  # those of another device are replaced
    if options.again:
        rows = [row for row in rows if row["item"] not in items]
    torch = options.torch
    if torch is None and any(item.startswith("torch/") for item in pending(items, rows)):
        torch = python_with_torch()
    save = lambda rows: results.save("gpu", rows, "make gpu", note=note, folder=folder)
    left = measure(items, rows, runner(name is None, torch), save, begun + options.seconds)
    print(json.dumps({"benchmark": "gpu", "device": name or "CPU", "rows": rows, "left": left}))


if __name__ == "__main__":
    main()
