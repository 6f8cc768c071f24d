"""A step of ZeRO 2 over CPU processes, with the reduce-scatters that JAX sends by itself and without: jax before 0.12
makes every later all-reduce slow.

    python benchmarks/zero_over_gloo.py --processes 4 --steps 40 --turns 2

Four layers of 512 x 512, Adam; by turns, each in processes of its own. One JSON line: the median milliseconds of a
step, for each turn. `before` takes `compat.lower_reduce_scatter_as_all_to_all` away, as it was; from jax 0.12 on both
are the same program.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

TASK = """
import jax, jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

WIDTH, LAYERS = 512, 4
x = np.random.default_rng(0).normal(size=(256, WIDTH)).astype(np.float32)

def init(key):
    return {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for i, k in enumerate(jax.random.split(key, LAYERS))}

def loss_fn(params, batch, key):
    h = batch["x"]
    for i in range(LAYERS):
        h = jnp.tanh(h @ params[f"w{i}"])
    return sk.mean((h.sum(1) - batch["y"]) ** 2)

task = sk.Task(init, loss_fn, optax.adam(1e-3), train_data={"x": x, "y": np.sin(x.sum(1))})
"""  # noqa: E501
CONFIG = """
task: task.py:task
batch_size: 64
mesh: {fsdp: -1}
layout: {zero: 2}
checkpoint: null
log: {every_steps: 1, progress: plain}
"""
PROCESS = """
import sys
from spmdkit import compat
if sys.argv[1] == "before":
    compat.lower_reduce_scatter_as_all_to_all = lambda: None
from spmdkit.cli import main
sys.exit(main(sys.argv[2:]))
"""


def milliseconds(folder: Path, way: str, turn: int, asked: argparse.Namespace) -> float:
    """Returns the median of a step, the first quarter of the run left out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    name = f"{way}{turn}"
    command = [sys.executable, "-c", PROCESS, way, "train", "run.yaml", f"run_dir={name}", f"steps={asked.steps}"]
    place = {"SPMDKIT_COORDINATOR": coordinator, "SPMDKIT_NUM_PROCESSES": str(asked.processes), "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [*command, f"devices=cpu:{asked.processes}"],
            cwd=folder,
            env=os.environ | place | {"SPMDKIT_PROCESS_ID": str(process)},
            stdout=subprocess.DEVNULL,
        )
        for process in range(asked.processes)
    ]
    try:
        codes = [each.wait(timeout=600) for each in started]
        if any(codes):
            raise SystemExit(f"{way}: a process has failed, see above")
    finally:
        for each in started:
            each.kill()
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return 1e3 * statistics.median(line["step_time_s"] for line in lines[asked.steps // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        (folder / "run.yaml").write_text(CONFIG)
        found: dict[str, list[float]] = {"before": [], "now": []}
        for turn in range(asked.turns):
            for way, values in found.items():
                values.append(round(milliseconds(folder, way, turn, asked), 1))
    print(json.dumps({"processes": asked.processes, "step_ms": found}))


if __name__ == "__main__":
    main()
