"""What a tracker costs a step: one that takes a second per call, one that raises, and one that never returns.

    python benchmarks/trackers.py [--rounds 6] [--steps 400]

Each run logs every step, and passes every second record on to the tracker. Its row has the median time of the steps
with the tracker over that of the steps between them, so that other work on the machine slows both; the median time that
the training thread needs for a record, with and without; and the warnings of a run. The row without a tracker shows the
error of the measurement. The time at the end of a run is not a step: there a run waits up to ten seconds for the
records in the queue.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

TRACKER = """
import threading, time
import spmdkit as sk

def slow(kind, record): time.sleep(1.0)
def dead(kind, record): raise ConnectionError("no route to host")
def hung(kind, record): threading.Event().wait()

@sk.tracker
def open(run, last_step, kind):
    return sk.Tracker({"slow": slow, "dead": dead, "hung": hung}[kind])
"""
KINDS = {
    "none": "no tracker",
    "slow": "1 s per call",
    "dead": "each call raises",
    "hung": "no call returns",
}
WIDTH, ROWS = 512, 256


def measure(kind: str, steps: int, folder: Path) -> tuple[dict[str, list[float]], int]:
    """Returns the seconds of steps and of records, by whether the tracker received them, and the number of warnings."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import spmdkit as sk

    seconds: dict[str, list[float]] = {
        f"{what} {how}": [] for what in ("step", "record") for how in ("with", "without")
    }
    warnings, before = list[str](), [0.0]

    def after_step(run: Any, step: int, state: Any, metrics: Any) -> None:
        now = time.perf_counter()
        if step > 20:
            seconds[f"step {how(step)}"].append(now - before[0])
        if step == 1:
            trackers = run.reporter.trackers
            trackers._warn, trackers.write = warnings.append, timed(trackers, trackers.write)
        before[0] = time.perf_counter()

    def how(step: int) -> str:
        return "without" if step % 2 else "with"

    def timed(trackers: Any, write: Any) -> Any:
        def timed_write(record: Any, kind: str = "scalars") -> None:
            others = trackers._others
            trackers._others = others if how(record["step"]) == "with" else {}
            begun = time.perf_counter()
            write(record, kind)
            seconds[f"record {how(record['step'])}"].append(time.perf_counter() - begun)
            trackers._others = others

        return timed_write

    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    task = sk.Task(
        lambda key: {"w": jax.random.normal(key, (4, WIDTH, WIDTH)) / WIDTH},
        lambda params, batch, key: sk.mean(jnp.sum((batch @ params["w"]) ** 2, (0, 2))),
        optax.sgd(1e-3),
        x,
        hooks=[sk.Hook("clock", order=99, after_step=after_step)],
    )
    trackers = [] if kind == "none" else [{f"{folder}/tracker.py:open": {"kind": kind}}]
    settings: dict[str, Any] = {"log": {"every_steps": 1, "progress": "off", "trackers": trackers}, "checkpoint": None}
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        sk.train(
            task=task, steps=steps, batch_size=ROWS, devices="cpu:2", mesh={"data": 2}, run_dir=run_dir, **settings
        )
    return seconds, len(warnings)


def main() -> None:
    """Measures all kinds and saves the table."""
    import results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tracker.py").write_text(TRACKER)
        found = [{kind: measure(kind, options.steps, Path(folder)) for kind in KINDS} for _ in range(options.rounds)]
    for kind, text in KINDS.items():
        medians = [{name: statistics.median(x) for name, x in each[kind][0].items()} for each in found]
        ms = {name: 1e3 * statistics.median(m[name] for m in medians) for name in medians[0]}
        row = {"tracker": text, "step, ms": ms["step with"]}
        row["over steps without it"] = results.interval([m["step with"] / m["step without"] for m in medians])
        row |= {"record, ms": ms["record with"], "without it, ms": ms["record without"]}
        rows.append(row | {"warnings of a run": max(each[kind][1] for each in found)})
    results.save("trackers", rows, " ".join(["python", "benchmarks/trackers.py", *sys.argv[1:]]))
    print(json.dumps({row["tracker"]: row["over steps without it"] for row in rows}))
    sys.stdout.flush()
    os._exit(0)  # a thread of a tracker that hangs


if __name__ == "__main__":
    main()
