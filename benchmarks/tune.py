"""`spmdkit tune` over the shipped configs that run on this machine's CPU: the ratio of the chosen settings.

    python benchmarks/tune.py [--seconds 120] [CONFIG ...]

The ratio is that of the last measurement, of all chosen settings next to the unchanged config; 1 where the unchanged
config wins. The written configs are removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import ROOT, save

CONFIGS = [
    *("demo", "one_device", "mirrored", "accumulation", "bfloat16", "fsdp"),
    *("tensor", "moe", "recurrent", "digits_cnn", "linear_regression", "pinn"),
]


def tuned(config: Path, seconds: float, folder: Path) -> dict[str, Any]:
    """Returns the row of a config."""
    command = [sys.executable, "-m", "spmdkit", "tune", str(config), f"--seconds={seconds:g}", "--json", "--again"]
    command.append(f"--write={folder / config.name}")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds + 600)
    if done.returncode:
        return {"config": config.name, "chosen": f"exit code {done.returncode}"}
    result = json.loads(done.stdout)
    variants, best = result["variants"], result["best"]
    row: dict[str, Any] = {"config": config.name, "chosen": "unchanged", "ratio": 1.0}
    if best is not None:
        figures = best["figures"]
        ratio = {"median": figures["ratio"], "low": figures["low"], "high": figures["high"], "rounds": figures["pairs"]}
        row |= {"chosen": best["name"], "ratio": ratio, "gradient differs by": f"{figures['gradient_difference']:.0e}"}
    tried = [variant for variant in variants if variant["figures"]]
    return row | {"measured": f"{len(tried)} of {len(variants)}", "seconds": result["seconds"]}


def main() -> None:
    """Tunes the configs in turn, saves the table and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=list(CONFIGS), metavar="CONFIG", help="names in configs/")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of the search for a config")
    options = parser.parse_args()
    rows = []
    names = "" if options.configs == list(CONFIGS) else f" {' '.join(options.configs)}"
    with tempfile.TemporaryDirectory() as folder:
        for name in options.configs:
            rows.append(tuned(ROOT / "configs" / f"{name}.yaml", options.seconds, Path(folder)))
            print(rows[-1], file=sys.stderr, flush=True)
            save("tune", rows, f"python benchmarks/tune.py --seconds {options.seconds:g}{names}")
    print(json.dumps({"benchmark": "tune", "rows": rows}))


if __name__ == "__main__":
    main()
