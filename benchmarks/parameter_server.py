"""A parameter server against one device, on the line and the digits: docs/benchmarks.md has the table.

    python benchmarks/parameter_server.py equal|converge [--transport threads] [--tasks line digits]

equal      one worker at staleness 0: largest relative difference of the parameters after 40 updates.
converge   two workers, after the same number of applied updates: evaluation loss, three seeds.

Each writes one JSON object to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

TASKS = {
    "line": {"task": "examples/linear_regression.py:task", "steps": 100, "batch_size": 64},
    "digits": {
        "task": "examples/digits_cnn.py:task",
        "task_args": {"width": 16},
        "steps": 300,
        "batch_size": 64,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    },
}


def config_of(folder: Path, name: str, **changes: Any) -> Path:
    """Returns the file of a config of a task; the run is in `folder`."""
    import yaml

    values = {
        **TASKS.get(name, {}),
        "devices": "cpu:1",
        "run_dir": str(folder / "run"),
        "log": {"progress": "off", "every_steps": 10},
    }
    values |= changes
    target, _, function = str(values["task"]).partition(":")
    values["task"] = f"{ROOT / target}:{function}"
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def trained(path: Path) -> tuple[dict[str, float], dict[str, np.ndarray], list[int]]:
    """Returns (evaluation, parameters, how many updates were of staleness 0, 1, ...) of a run in this process."""
    import spmdkit as sk
    from spmdkit.tree import named_leaves

    result = sk.train(path)
    counts = result.run.directory / "counts.jsonl"
    staleness = json.loads(counts.read_text().splitlines()[-1])["staleness_counts"] if counts.exists() else []
    params = {name: np.asarray(leaf) for name, leaf in named_leaves(result.state.params)}
    return result.evaluation or {}, params, staleness


def servers(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    return {"parameter_server": {"transport": options.transport, **more}}


def equal(options: argparse.Namespace) -> dict[str, Any]:
    """Largest relative difference, leaf by leaf, of the parameters at the end."""
    found = {}
    for name in options.tasks:
        params = []
        for sync in ("every_step", servers(options, workers=1, max_staleness=0)):
            with tempfile.TemporaryDirectory() as folder:
                params.append(trained(config_of(Path(folder), name, sync=sync, steps=40))[1])
        one, other = params
        error = lambda path: float(np.linalg.norm(one[path] - other[path]) / max(np.linalg.norm(one[path]), 1e-3))  # noqa: B023
        found[name] = max(map(error, one))
    return found


def converge(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluation losses of one device and of two workers, and the share of updates that were stale."""
    found: dict[str, Any] = {}
    for name in options.tasks:
        rows = []
        for seed in range(options.seeds):
            row = {}
            for kind, sync in (("sgd", "every_step"), ("two workers", servers(options, workers=2))):
                with tempfile.TemporaryDirectory() as folder:
                    evaluation, _, staleness = trained(config_of(Path(folder), name, sync=sync, seed=seed))
                row[kind] = evaluation["loss"]
                if staleness:
                    row["stale"] = 1 - staleness[0] / sum(staleness)
            rows.append(row)
        means = {kind: float(np.mean([row[kind] for row in rows])) for kind in ("sgd", "two workers")}
        found[name] = {"seeds": rows, **means, "ratio": means["two workers"] / means["sgd"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["equal", "converge"])
    parser.add_argument("--transport", default="ray")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps({options.what: globals()[options.what](options)}, indent=2))


if __name__ == "__main__":
    main()
