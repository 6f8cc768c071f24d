"""A parameter server against one device, on the line and the digits: docs/measured/benchmarks.md has the table.

    python benchmarks/parameter_server.py equal|converge [--transport threads] [--tasks line digits]
    python benchmarks/parameter_server.py slow|wire

equal      one worker at staleness 0: largest relative difference of the parameters after 40 updates.
converge   two workers, after the same number of applied updates: evaluation loss, three seeds.
slow       two workers that wait for their data, one of them for five times as long from the middle on: rates of both
           before and after.
wire       a push with its update, and a pull, against a transfer of the same arrays to and from an actor of Ray that
           does nothing else: 50 MB, in turn.

Each writes one JSON object to standard output. Exit code 1 where a number is beyond its bound in BOUNDS, which is said
on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

TASKS = {
    "line": {"task": "examples/linear_regression.py:task", "steps": 100, "batch_size": 64},
    "digits": {
        "task": "examples/digits_cnn.py:task",
        "task_args": {"width": 16},
        "steps": 300,
        "batch_size": 64,
        "optimizer": {"name": "sgd", "learning_rate": 0.02},
    },
}


INFINITE = float("inf")

BOUNDS: dict[str, list[tuple[str, Callable[[dict[str, Any]], float], float, float]]] = {
    "equal": [("the largest relative difference", lambda found: max(found.values()), 0, 1e-5)],
    "converge": [
        ("loss of two workers over that of one device", lambda found: max(x["ratio"] for x in found.values()), 0, 1.05),
        (
            "the share of stale updates",
            lambda found: min(row["stale"] for x in found.values() for row in x["seeds"]),
            0.5,
            1,
        ),
    ],
    "slow": [("the other worker's rate over what it was", lambda found: found["ratio"]["worker 0"], 0.9, INFINITE)],
    "wire": [
        ("a push with its update over a plain transfer", lambda found: found["push over plain"], 0.5, INFINITE),
        ("a pull over a plain transfer", lambda found: found["pull over plain"], 0.8, INFINITE),
    ],
}
"""What is measured -> (what, the number in what was found, least, most)."""


def missed(what: str, found: dict[str, Any]) -> list[str]:
    """Returns a line for each number that is beyond its bound; one that is not a number is."""
    numbers = [(name, read(found), least, most) for name, read, least, most in BOUNDS[what]]
    return [
        f"{name} is {x:.3g}, not from {low:g} to {high:g}" for name, x, low, high in numbers if not low <= x <= high
    ]


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
    from spmdkit.foundation.trees import named_leaves

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
                row |= {f"{kind}, accuracy": value for name, value in evaluation.items() if name == "accuracy"}
                if staleness:
                    row["stale"] = 1 - staleness[0] / sum(staleness)
            rows.append(row)
        means = {kind: float(np.mean([row[kind] for row in rows])) for kind in ("sgd", "two workers")}
        found[name] = {"seeds": rows, **means, "ratio": means["two workers"] / means["sgd"]}
    return found


# ---- slow

WAIT_S, FAST_READS = 0.4, 40


class Waits:
    """Examples of a line, for each of which a worker waits, and worker 1 for five times as long after `FAST_READS`."""

    reads = 0

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.reads += 1
        slow = os.environ.get("SPMDKIT_WORKER") == "1" and self.reads > FAST_READS
        time.sleep(WAIT_S * (5 if slow else 1))
        return {"x": np.float32(index / 1024)}


@sk.task
def waiting() -> sk.Task:
    """Returns a task of one number."""
    loss = lambda params, batch, key: sk.mean((params["w"] * batch["x"] - batch["x"]) ** 2)
    return sk.Task(lambda key: {"w": jnp.zeros(())}, loss, optax.sgd(0.01), train_data=Waits())


def slow(options: argparse.Namespace) -> dict[str, Any]:
    """Rates of both workers, in intervals in which they are alike, and in those in which one is slow."""
    sync = {"parameter_server": {"transport": "ray", "workers": 2}}
    more = {"task": "benchmarks/parameter_server.py:waiting", "sync": sync, "checkpoint": None}
    with tempfile.TemporaryDirectory() as folder:
        log = {"progress": "off", "every_steps": 10}
        path = config_of(Path(folder), "", **more, steps=3 * FAST_READS, batch_size=1, log=log)
        directory = sk.train(path).run.directory
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rates = [(x["worker_0_pushes_per_s"], x["worker_1_pushes_per_s"]) for x in lines if "worker_1_pushes_per_s" in x]
    kinds = {
        "alike": [pair for pair in rates if pair[1] > 0.7 * pair[0]],
        "one slow": [pair for pair in rates if pair[1] < 0.4 * pair[0]],
    }
    of = {kind: [statistics.median(pair[i] for pair in found) for i in (0, 1)] for kind, found in kinds.items()}
    ratios = {f"worker {i}": of["one slow"][i] / of["alike"][i] for i in (0, 1)}
    return {"pushes per s": of, "intervals": {kind: len(found) for kind, found in kinds.items()}, "ratio": ratios}


# ---- wire

LEAVES, FLOATS = 8, 1_600_000


@sk.task
def wide() -> sk.Task:
    """Returns a task of 50 MB of parameters."""
    loss = lambda params, batch, key: sk.mean(sum(leaf[0] for leaf in params.values()) * batch["x"])
    params = {f"w{i}": jnp.zeros(FLOATS) for i in range(LEAVES)}
    return sk.Task(lambda key: params, loss, optax.sgd(0.01), train_data={"x": np.ones(64, np.float32)})


class Plain:
    """An actor that takes and gives arrays, and does nothing with them."""

    def keep(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = {path: np.array(x) for path, x in arrays.items()}

    def take(self, arrays: dict[str, np.ndarray]) -> int:
        return len(arrays)

    def give(self) -> dict[str, np.ndarray]:
        return self.arrays


def wire(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each, the median of 15 in turn, and the ratios of rates."""
    from spmdkit.parameter_server.actors import Actors, import_ray
    from spmdkit.parameter_server.messages import Push
    from spmdkit.parameter_server.transport import call

    random = np.random.default_rng(0)
    arrays = {f"w{i}": random.normal(size=FLOATS).astype(np.float32) for i in range(LEAVES)}
    num_bytes = sum(x.nbytes for x in arrays.values())
    found: dict[str, list[float]] = {"plain to": [], "push": [], "plain from": [], "pull": []}
    with tempfile.TemporaryDirectory() as folder:
        sync = {"parameter_server": {"workers": 1}}
        path = config_of(
            Path(folder), "", task="benchmarks/parameter_server.py:wide", sync=sync, steps=1000, batch_size=64
        )
        transport = Actors(sk.load_config(path), Path(folder), "local", 2, num_bytes)
        try:
            ray = import_ray()
            server, plain = transport.server(0), ray.remote(num_cpus=0)(Plain).remote()
            ray.get(plain.keep.remote(arrays))
            call(server, "install", 1, {"params": arrays}, {"applied": 0}, {0: 0})
            for number in range(18):
                push = Push(0, 0, number, 1, number, number + 1, arrays)
                calls: dict[str, Callable[[], Any]] = {
                    "plain to": lambda: ray.get(plain.take.remote(arrays)),
                    "push": lambda push=push: call(server, "push", push),
                    "plain from": lambda: ray.get(plain.give.remote()),
                    "pull": lambda: call(server, "pull"),
                }
                for name, timed in calls.items():
                    begin = time.perf_counter()
                    timed()
                    found[name].append(time.perf_counter() - begin)
            assert call(server, "pull").version == 18
        finally:
            transport.close()
    seconds = {name: statistics.median(values[3:]) for name, values in found.items()}
    return {
        "MB": num_bytes / 1e6,
        "MB/s": {name: num_bytes / 1e6 / value for name, value in seconds.items()},
        "push over plain": seconds["plain to"] / seconds["push"],
        "pull over plain": seconds["plain from"] / seconds["pull"],
    }


def main() -> int:
    """Prints what is found; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*BOUNDS])
    parser.add_argument("--transport", default="ray")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = globals()[options.what](options)
    print(json.dumps({options.what: found}, indent=2))
    beyond = missed(options.what, found)
    for line in beyond:
        print(f"{options.what}: {line}", file=sys.stderr)
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
