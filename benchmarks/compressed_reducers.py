"""The loss of compressed reducers compared with `sum`: the byte GPT of configs/mirrored.yaml, 400 steps, 8 replicas,
three seeds.

    python benchmarks/compressed_reducers.py [--only int8] [--seeds 0 1 2] [--steps 400] [--results FILE] [--json]

Each run is `spmdkit train`'s own step on 8 fake devices of this CPU; the loss is that of the whole evaluation set after
the last step. FILE stores a line for each run and is read again, so that an interrupted benchmark continues. Exit code
1 if a mean is above its bound in BOUNDS.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "configs" / "mirrored.yaml"
BOUNDS = {"bfloat16": 1.01, "int8": 1.01, "powersgd, rank 16, warm-up 40": 1.02}
TASK = {"width": 64, "layers": 2, "heads": 4, "context": 64, "train_bytes": 1_000_000, "eval_bytes": 65_536}
REDUCERS: dict[str, Any] = {
    "sum": "sum",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "powersgd": {"powersgd": {"rank": 4}},
    "powersgd, rank 8, warm-up 40": {"powersgd": {"rank": 8, "warmup": 40}},
    "powersgd, rank 16, warm-up 40": {"powersgd": {"rank": 16, "warmup": 40}},
    "float8": "float8",
    "topk, 5 %": {"topk": {"fraction": 0.05}},
    "sign, warm-up 40": {"sign": {"warmup": 40}},
}


def run(reducer: Any, seed: int, steps: int) -> dict[str, Any]:
    """Returns the evaluation loss and the seconds of one run."""
    import spmdkit as sk
    from spmdkit.tools.bench.interleaved import Trained, train_interleaved

    rate = {"name": "warmup_cosine_decay_schedule", "init_value": 0.0, "peak_value": 5e-3, "warmup_steps": 20}
    changes = {"reducer": reducer, "seed": seed, "steps": steps, "learning_rate": rate | {"decay_steps": steps}}
    changes |= {"checkpoint": None, "run_dir": None, "task_args": TASK}
    program = sk.build(sk.load_config(CONFIG, [f"{key}={json.dumps(value)}" for key, value in changes.items()]))
    start, trained = time.process_time(), Trained(program, steps)
    train_interleaved([trained])
    return {"eval_loss": trained.loss, "processor_s": time.process_time() - start}


def table(found: dict[tuple[str, int], dict[str, Any]], names: list[str], seeds: list[int]) -> str:
    """Returns the table of the runs in markdown."""
    lines = [
        "| reducer | evaluation loss, mean | least to most | over sum, mean | least to most |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        losses = [found[name, seed]["eval_loss"] for seed in seeds]
        ratios = over_sum(found, name, seeds)
        spread = f"{min(losses):.4f} to {max(losses):.4f}"
        worst = f"{min(ratios) - 1:+.2%} to {max(ratios) - 1:+.2%}"
        lines.append(
            f"| {name} | {statistics.mean(losses):.4f} | {spread} | {statistics.mean(ratios) - 1:+.2%} | {worst} |"
        )
    return "\n".join(lines)


def over_sum(found: dict[tuple[str, int], dict[str, Any]], name: str, seeds: list[int]) -> list[float]:
    """Returns the evaluation loss over that of `sum`, for each seed."""
    return [found[name, seed]["eval_loss"] / found["sum", seed]["eval_loss"] for seed in seeds]


def main() -> int:
    """Returns 0 if every reducer is within its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="*", help="names of the reducers to run; sum always runs")
    parser.add_argument("--results", type=Path, default=Path("compressed_reducers.jsonl"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    names = [name for name in REDUCERS if name == "sum" or not options.only or name in options.only]
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    records = [json.loads(line) for line in lines]
    found = {(r["reducer"], r["seed"]): r for r in records if r["steps"] == options.steps}
    for seed, name in itertools.product(options.seeds, names):
        if (name, seed) not in found:
            record = {"reducer": name, "seed": seed, "steps": options.steps}
            record |= run(REDUCERS[name], seed, options.steps)
            found[name, seed] = record
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            said = f"{name}, seed {seed}: {record['eval_loss']:.4f} ({record['processor_s']:.0f} s)"
            print(said, file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"steps": options.steps, "runs": [found[n, s] for n in names for s in options.seeds]}))
    else:
        print(table(found, names, options.seeds))
    above = {n: statistics.mean(over_sum(found, n, options.seeds)) for n in names if n in BOUNDS}
    return int(any(mean > BOUNDS[n] for n, mean in above.items()))


if __name__ == "__main__":
    sys.exit(main())
