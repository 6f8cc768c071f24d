"""The loss of delayed synchronization compared with every step: the byte GPT of configs/mirrored.yaml, 400 steps, 8
replicas, three seeds.

    python benchmarks/delayed_sync.py [--tune [--start 200]] [--only PART ...] [--seeds 0 1 2] [--steps 400] [--width
    64] [--layers 2] [--batch-size 32]
        [--context 64] [--train-bytes 4000000] [--eval-bytes 65536] [--results FILE] [--json]

Each run is `spmdkit train`'s own step on 8 fake devices of this CPU; the loss is that of the whole evaluation set after
the last step, for syncs of groups with the synchronized parameters. `--tune` tries outer learning rates and momenta of
DiLoCo with the first seed alone. FILE stores a line for each run and is read again, so that an interrupted benchmark
continues. Exit code 1 if DiLoCo every 16 after half of 400 synchronous steps is more than 3 % above.
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
MOST = 1.03
TUNED = {"name": "sgd", "learning_rate": 1.0, "momentum": 0.5, "nesterov": True}
CHECKED = "diloco every 16 from 200"
SYNCS: dict[str, Any] = {
    "every_step": "every_step",
    "local_sgd every 16": {"local_sgd": {"every": 16}},
    "post_local from 100, every 16": {"post_local": {"start": 100, "every": 16}},
    CHECKED: {"diloco": {"every": 16, "start": 200, "optimizer": TUNED}},
    "diloco every 16 from 100": {"diloco": {"every": 16, "start": 100, "optimizer": TUNED}},
    "diloco every 16": {"diloco": {"every": 16, "optimizer": TUNED}},
    "diloco every 16, int8": {"diloco": {"every": 16, "optimizer": TUNED, "reducer": "int8"}},
    "stale 4": {"stale": 4},
}
RATES, MOMENTA = (0.5, 0.7, 1.0), (0.0, 0.5, 0.8, 0.9)


def tried(start: int) -> dict[str, Any]:
    """Returns name -> sync, for the outer optimizers to try."""
    found, begins = {}, f" from {start}" if start else ""
    for rate, momentum in itertools.product(RATES, MOMENTA):
        outer = {"name": "sgd", "learning_rate": rate} | ({"momentum": momentum, "nesterov": True} if momentum else {})
        diloco = {"every": 16, "start": start, "optimizer": outer}
        found[f"diloco every 16{begins}, outer {rate:g} / {momentum:g}"] = {"diloco": diloco}
    return found


def run(sync: Any, seed: int, steps: int, batch_size: int, **task_args: int) -> dict[str, Any]:
    """Returns the losses and the seconds of one run."""
    import spmdkit as sk
    from spmdkit.tools.bench.interleaved import Trained, train_interleaved

    rate = {"name": "warmup_cosine_decay_schedule", "init_value": 0.0, "peak_value": 5e-3, "warmup_steps": 20}
    changes = {"sync": sync, "seed": seed, "steps": steps, "learning_rate": rate | {"decay_steps": steps}}
    changes |= {"checkpoint": None, "run_dir": None, "batch_size": batch_size}
    changes |= {"task_args": task_args | {"heads": task_args["width"] // 16}}
    program = sk.build(sk.load_config(CONFIG, [f"{key}={json.dumps(value)}" for key, value in changes.items()]))
    start, trained = time.process_time(), Trained(program, steps)
    train_interleaved([trained])
    return {
        "train_loss": trained.losses[-1],
        "eval_loss": trained.loss,
        "processor_s": time.process_time() - start,
    }


def table(found: dict[tuple[str, int], dict[str, Any]], names: list[str], seeds: list[int]) -> str:
    """Returns the table of the runs in markdown."""
    plain = [found["every_step", seed]["eval_loss"] for seed in seeds]
    lines = [
        "| sync | evaluation loss, mean | least to most | over every_step, mean | worst seed |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        losses = [found[name, seed]["eval_loss"] for seed in seeds]
        ratios = [a / b for a, b in zip(losses, plain, strict=True)]
        spread = f"{min(losses):.3f} to {max(losses):.3f}"
        mean = f"{statistics.mean(ratios) - 1:+.2%}"
        lines.append(f"| {name} | {statistics.mean(losses):.3f} | {spread} | {mean} | {max(ratios) - 1:+.2%} |")
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if DiLoCo is within its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of all eight replicas")
    parser.add_argument("--train-bytes", type=int, default=4_000_000, help="of text")
    parser.add_argument("--eval-bytes", type=int, default=65_536, help="bytes of held-out files")
    parser.add_argument("--start", type=int, default=0, help="with --tune: steps of synchronous training before DiLoCo")
    parser.add_argument("--tune", action="store_true", help="try outer optimizers with the first seed")
    parser.add_argument("--only", nargs="*", help="parts of the names of the syncs to run")
    parser.add_argument("--results", type=Path, default=Path("delayed_sync.jsonl"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    asked = tried(options.start) if options.tune else SYNCS
    names = [n for n in asked if n == "every_step" or not options.only or any(part in n for part in options.only)]
    seeds = options.seeds[:1] if options.tune else options.seeds
    names = [*(["every_step"] if "every_step" not in names else []), *names]
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    of_run = ("steps", "width", "layers", "context", "batch_size", "train_bytes", "eval_bytes")
    setting = {k: getattr(options, k) for k in of_run}
    records = [json.loads(line) for line in lines]
    found = {(r["sync"], r["seed"]): r for r in records if all(r.get(k) == v for k, v in setting.items())}
    for seed, name in itertools.product(seeds, names):
        if (name, seed) not in found:
            record = {"sync": name, "seed": seed} | setting
            record |= run((SYNCS | asked)[name], seed, **setting)
            found[name, seed] = record
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{name}, seed {seed}: {record['eval_loss']:.4f} ({record['processor_s']:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    if options.json:
        print(json.dumps(setting | {"runs": [found[name, seed] for name in names for seed in seeds]}))
    else:
        print(table(found, names, seeds))
    checked = [name for name in names if name == CHECKED]
    means = {
        n: statistics.mean(found[n, s]["eval_loss"] / found["every_step", s]["eval_loss"] for s in seeds)
        for n in checked
    }
    return int(any(mean > MOST for mean in means.values()))


if __name__ == "__main__":
    sys.exit(main())
