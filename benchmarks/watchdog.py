"""What the watchdog, signals and journal cost a run in which nothing goes wrong: host time of an empty step, with and
without.

    python benchmarks/watchdog.py [--steps 20000] [--json]

One process, one CPU device, a step that adds nothing to one number; the loop is the toolkit's own. Blocks with and
without a watchdog take turns, since times on a shared machine mean nothing alone; told are medians of blocks, in
seconds of processor time of the whole process (the watching thread's too) and of the training thread alone. Exit code 1
where the difference is more than 50 us a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join
from spmdkit.faults import StopSignals
from spmdkit.program.program import Program
from spmdkit.run.loop import watchdog_context
from spmdkit.run.run import Run
from spmdkit.run.trainer import run_steps

MAX_S = 50e-6
BLOCKS = 20


class Loop:
    """An open run of empty steps: a gradient of eight numbers, a log line every 1000 steps.

    Args:
        changes: of the config.
    """

    def __init__(self, folder: Path, most_steps: int, devices: str = "cpu:1", **changes: Any):
        data = {"x": np.zeros((8, 8), np.float32)}
        task = sk.Task(
            init=lambda key: {"w": jnp.zeros(8)},
            loss_fn=lambda params, batch, key: sk.mean(batch["x"] @ params["w"]),
            optimizer=optax.sgd(0.0),
            train_data=data,
        )
        config = sk.Config(
            task="watchdog.py:task",
            run_dir=str(folder),
            steps=most_steps,
            batch_size=8,
            devices=devices,
            checkpoint=None,
            **{"log": {"every_steps": 1000, "progress": "off"}, **changes},
        )
        self.cluster = join(detect_cluster({}), devices)
        self.program, self.config = Program(config, task, self.cluster.devices), config
        self.stack, self.state, self.run = ExitStack(), None, None

    def block(self, steps: int) -> tuple[float, float]:
        """Trains so many steps; returns seconds of (process, training thread) a step."""
        with ExitStack() as stack:
            signals = stack.enter_context(StopSignals())
            watchdog = stack.enter_context(watchdog_context(self.config, self.cluster))
            if self.run is None:
                self.run = self.stack.enter_context(Run(self.config, self.cluster, self.program, signals, watchdog))
                self.state = self.run.restore_or_init()
            self.run.signals, self.run.watchdog = signals, watchdog
            first = self.run.step + 1
            with self.program.stream(first, first + steps - 1) as batches:
                process, thread = time.process_time(), time.thread_time()
                self.state, _ = run_steps(self.run, self.state, batches)
                jax.block_until_ready(self.state.params)
                return (time.process_time() - process) / steps, (time.thread_time() - thread) / steps


def train_interleaved(loops: dict[str, Loop], each: int) -> dict[str, list[float]]:
    """Returns the medians of blocks of `each` steps, seconds of (process, training thread) a step, by name; closes the
    loops."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.block(each)
    for i in range(BLOCKS):
        for name in sorted(loops, reverse=bool(i % 2)):
            found[name].append(loops[name].block(each))
    for loop in loops.values():
        loop.stack.close()
    return {name: [statistics.median(x) for x in zip(*blocks, strict=True)] for name, blocks in found.items()}


def main() -> int:
    """Returns 0 where the cost is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="of each of the two")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    each = asked.steps // BLOCKS
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            "with": Loop(Path(folder) / "with", asked.steps + each + 1),
            "without": Loop(Path(folder) / "without", asked.steps + each + 1, watchdog=None),
        }
        medians = train_interleaved(loops, each)
    process_s, thread_s = (a - b for a, b in zip(medians["with"], medians["without"], strict=True))
    if asked.json:
        print(json.dumps({"steps": asked.steps, "process_s": process_s, "thread_s": thread_s, **medians}))
    else:
        for name, (process, thread) in medians.items():
            print(
                f"{name:8} {process * 1e6:7.1f} us a step of the process, {thread * 1e6:7.1f} us of the training thread"
            )
        print(
            f"cost     {process_s * 1e6:7.1f} us,                  {thread_s * 1e6:7.1f} us; at most {MAX_S * 1e6:.0f} us"  # noqa: E501
        )
    return int(max(process_s, thread_s) > MAX_S)


if __name__ == "__main__":
    sys.exit(main())
