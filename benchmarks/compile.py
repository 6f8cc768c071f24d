"""Compilation: the programs of a start, the layers of a GPT, and what `verify` and `plan --search` compile.

python benchmarks/compile.py [--layers 4 12 24 48 96] [--configs one_device mirrored ...]

programs   of a start to its first step (`spmdkit doctor --start`): each is compiled once
layers     trace, lowering and compilation of the step of a GPT of width 64, layers in a stack or apart
reuse      candidates of a search and cases of a verification, and the programs that are compiled for them
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from results import ROOT, save

from spmdkit.config import load_config
from spmdkit.program.opening import build
from spmdkit.tools.start import measure_start

CONFIGS = ["linear_regression", "one_device", "mirrored", "fsdp", "moe"]
ENVIRONMENT = {**os.environ, "SPMDKIT_COMPILE_CACHE": "off"}


def programs(name: str) -> dict[str, Any]:
    """Returns the row of the programs that a start of a config compiles."""
    found = measure_start(ROOT / "configs" / f"{name}.yaml", [], ENVIRONMENT)
    counts = collections.Counter(program for program, _ in found["programs"])
    return {
        "what": f"start of {name}.yaml",
        "programs": len(found["programs"]),
        "compiled twice": sum(count > 1 for count in counts.values()),
        "compile, s": sum(seconds for _, seconds in found["programs"]),
    }


def of_layers(layers: int, stacked: bool) -> dict[str, Any]:
    """Returns the row of a GPT, compiled in this process without a cache."""
    arguments = {
        "width": 64,
        "layers": layers,
        "heads": 4,
        "context": 64,
        "random_tokens": True,
        "scan_layers": stacked,
    }
    overrides = [f"task_args={json.dumps(arguments)}"]
    config = load_config(ROOT / "configs" / "one_device.yaml", overrides)
    begin = time.perf_counter()
    program = build(config)
    opened = time.perf_counter()
    _ = program.lowered
    lowered = time.perf_counter()
    _ = program.compiled
    end = time.perf_counter()
    return {
        "what": f"GPT of {layers} layers, {'in a stack' if stacked else 'apart'}",
        "open and trace, s": opened - begin,
        "lower, s": lowered - opened,
        "compile, s": end - lowered,
    }


def reuse() -> list[dict[str, Any]]:
    """Returns the rows of a search and of a verification: the programs are those that JAX logs."""
    over = ["--search", "--search-over", "mesh,microbatches", "--compile", "2", "--target", "cpu:4"]
    plan, row = _logged(["plan", str(ROOT / "configs" / "one_device.yaml"), *over, "--json"])
    row["what"] = f"search, {plan['num_compiled']} of {len(plan['candidates'])} candidates compiled"
    found, other = _logged(["verify", str(ROOT / "configs" / "verify" / "gpt.yaml"), "--no-mutants", "--json"])
    other["what"] = f"verify, {len(found['cases'])} cases"
    return [row, other]


def _logged(arguments: list[str]) -> tuple[Any, dict[str, Any]]:
    """Returns the JSON of a command, and its seconds and compiled programs."""
    command = [sys.executable, "-m", "spmdkit", *arguments]
    begin = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "JAX_LOG_COMPILES": "1"}
    )
    steps = len(re.findall(r"Finished XLA compilation of jit\(", done.stderr))
    return json.loads(done.stdout), {"what": "", "programs": steps, "command, s": time.perf_counter() - begin}


def main() -> None:
    """Measures, saves the table and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 12, 24, 48, 96])
    parser.add_argument("--configs", nargs="*", default=CONFIGS, metavar="CONFIG", help="names in configs/")
    options = parser.parse_args()
    rows = [programs(name) for name in options.configs]
    os.environ["SPMDKIT_COMPILE_CACHE"] = "off"
    rows += [of_layers(num, stacked) for num in options.layers for stacked in (True, False)]
    rows += reuse()
    command = f"python benchmarks/compile.py --layers {' '.join(map(str, options.layers))}"
    save("compile", rows, f"{command} --configs {' '.join(options.configs)}")
    print(json.dumps({"benchmark": "compile", "rows": rows}))


if __name__ == "__main__":
    main()
