"""Plans from 8 to 6,144 chips: time of the compiler, bytes sent per device, and predicted weak scaling.

    python benchmarks/scale.py [--devices 8 64 512 6144] [--strategies mirrored hsdp diloco int8] [--target tpu:v5p]

A GPT of 125 million parameters with 8 examples of 1,024 tokens per chip is compiled for each number of chips by the
compiler of the target (extra `tpu` or `gpu-plan`). No chip is needed. Efficiency: predicted step time at the smallest
number of chips / that at N. Horovod's published efficiency is 90 % at 512 GPUs (Inception V3 and ResNet-101 on 128
servers of four Pascal GPUs; Sergeev and Del Balso, 2018): measured, another model and another network. Saved rows of
other strategies stay. Also writes benchmarks/results/scale.png.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from results import FOLDER, ROOT, save

from spmdkit.plan.sweep import family_target

ROWS = 8
MODEL = {
    "width": 768,
    "layers": 12,
    "heads": 12,
    "hidden": 3072,
    "vocab": 32768,
    "context": 1024,
    "random_tokens": True,
}
STRATEGIES = {
    "mirrored": ["mesh={data: -1}"],
    "hsdp": ["mesh={replica: -1, fsdp: 8}"],
    "diloco": ["mesh={data: -1}", "sync={diloco: {every: 100}}"],
    "int8": ["mesh={data: -1}", "reducer=int8"],
}
HOROVOD = (512, 0.90)
TIMEOUT_S = 900


def plan(strategy: str, devices: int, target: str) -> dict[str, Any]:
    """Returns the row of a strategy on a number of chips."""
    keys = [f"task_args={json.dumps(MODEL)}", f"batch_size={ROWS * devices}", *STRATEGIES[strategy]]
    command = [sys.executable, "-m", "spmdkit", "plan", str(ROOT / "configs" / "gpt_1b.yaml"), *keys, "--json"]
    begin, used = time.perf_counter(), _processor_s()
    done = subprocess.run(
        [*command, "--target", family_target(target, devices)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    seconds = {"plan, s": time.perf_counter() - begin, "plan, processor s": _processor_s() - used}
    row: dict[str, Any] = {"strategy": strategy, "chips": devices, **seconds}
    try:
        found = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return row | {"note": lines[-1][:120]}
    agreement_s = sum(each["seconds"] / each["every"] for each in found["collectives"] if each.get("every", 1) > 1)
    step_s = found["predicted_step_s"] + agreement_s
    return row | {"MB sent per chip and step": found["wire"]["on_average"] / 1e6, "step, ms": 1e3 * step_s}


def _processor_s() -> float:
    """Returns the processor time of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def draw(rows: list[dict[str, Any]]) -> None:
    """Draws efficiency by chips."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for strategy in STRATEGIES:
        points = [(r["chips"], r["efficiency"]) for r in rows if r["strategy"] == strategy and "efficiency" in r]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{strategy} (predicted)")
    axes.plot(*HOROVOD, "kx", label="Horovod, 512 GPUs (published, 2018)")
    axes.set(xscale="log", xlabel="chips", ylabel="weak scaling efficiency", ylim=(0, 1.05))
    axes.legend()
    figure.savefig(FOLDER / "scale.png", dpi=120, bbox_inches="tight")


def main() -> None:
    """Plans in turn, saves the table and the plot, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 64, 512, 6144])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--target", default="tpu:v5p", help="family of machines, as for plan --sweep devices=")
    options = parser.parse_args()
    saved = json.loads((FOLDER / "scale.json").read_text())["rows"] if (FOLDER / "scale.json").exists() else []
    rows = [row for row in saved if row["strategy"] not in options.strategies]
    for strategy in options.strategies:
        first = None
        for devices in options.devices:
            row = plan(strategy, devices, options.target)
            first = first or row.get("step, ms")
            if first and "step, ms" in row:
                row["efficiency"] = first / row["step, ms"]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            command = f"python benchmarks/scale.py --devices {' '.join(map(str, options.devices))}"
            save("scale", rows, f"{command} --target {options.target}")
    draw(rows)
    print(json.dumps({"benchmark": "scale", "rows": rows}))


if __name__ == "__main__":
    main()
