"""What keeping a step's memory brings and costs on CPU devices: step time, page faults, resident memory, reader
threads.

    python benchmarks/allocator.py [--devices 1] [--rounds 8] [--json FILE]

A process for each choice of SPMDKIT_ALLOCATOR, both open, and only one of them works at a time, a few steps in turn:
absolute times on a shared machine mean nothing, so that what is reported is the ratio of neighbouring turns, median,
least and most, of wall time and of the processors' time. Reading is measured in the same way: examples of 64 KiB made
by Python functions and numpy, by one and by four threads of grain, without any step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS, BATCHES = 4, 12
THREADS = (1, 4)


class Examples:
    """1,000 examples of 64 KiB, each made of a few arrays of its own: what a reader that decodes asks of the
    allocator."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int):
        import numpy as np

        rows = [np.random.default_rng(int(index) + i).random(2048, np.float32) for i in range(8)]
        return np.sort(np.concatenate(rows))


def work(choice: str, num_devices: int) -> None:
    """Builds the step, then answers each line of standard input by one turn of what it names."""
    from spmdkit.program import allocator

    retains_memory = allocator.limit_arenas(f"cpu:{num_devices}", {**os.environ, allocator.SWITCH: choice})

    import jax

    import spmdkit as sk
    from spmdkit.data import Schedule, host_batches, open_source

    mesh = "{}" if num_devices == 1 else f"{{data: {num_devices}}}"
    args = "{width: 128, layers: 4, heads: 4, context: 128, train_bytes: 1000000, eval_bytes: 16384}"
    overrides = [f"devices=cpu:{num_devices}", f"mesh={mesh}", f"task_args={args}", "steps=1000000"]
    program = sk.build(ROOT / "configs/one_device.yaml", overrides=overrides)
    state = program.init()
    batches = iter(program.batches())

    def step() -> tuple[float, float, int]:
        nonlocal state
        batch = jax.block_until_ready(next(batches)[1])
        begun, cpu, before = (
            time.perf_counter(),
            time.process_time(),
            resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        )
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return time.perf_counter() - begun, time.process_time() - cpu, faults

    def read(num_threads: int) -> tuple[float, float, int]:
        source = open_source(Examples())
        schedule = Schedule(len(source), 32, seed=0)
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in host_batches(source, schedule, None, 1, BATCHES + 1, threads=num_threads):
            pass
        return (time.perf_counter() - begun) / BATCHES, (time.process_time() - cpu) / BATCHES, 0

    step()
    if retains_memory:
        assert allocator.disable_trimming()
    step()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("step"):
            turns = [step() for _ in range(STEPS)][1:]
            answer = [statistics.median(column) for column in zip(*turns, strict=True)]
        elif line.startswith("read"):
            answer = list(read(int(line.split()[1])))
        else:
            status = Path("/proc/self/status").read_text()
            answer = [int(status.split(f"{name}:")[1].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")]
        print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.devices)
        return
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    open_: dict[str, subprocess.Popen[str]] = {}
    for choice in ("system", "keep"):
        command = [sys.executable, __file__, "--work", choice, "--devices", str(options.devices)]
        open_[choice] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        assert open_[choice].stdout.readline().strip() == "ready"

    def ask(choice: str, what: str) -> list[float]:
        process = open_[choice]
        print(what, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    found: dict[str, object] = {"devices": options.devices}
    for what in ("step", *(f"read {n}" for n in THREADS)):
        turns = [{choice: ask(choice, what) for choice in open_} for _ in range(options.rounds)]
        row: dict[str, object] = {}
        for column, name in enumerate(("wall", "processors")):
            ratios = sorted(turn["keep"][column] / turn["system"][column] for turn in turns)
            row[f"{name} ms"] = {c: round(1e3 * statistics.median(turn[c][column] for turn in turns), 1) for c in open_}
            row[f"{name} ratio"] = [round(r, 3) for r in (statistics.median(ratios), ratios[0], ratios[-1])]
        found[what] = row | {"faults": {choice: turns[-1][choice][2] for choice in open_}}
        if what == "step":
            found["MiB resident, largest"] = {choice: [round(n) for n in ask(choice, "memory")] for choice in open_}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found))
    for process in open_.values():
        process.stdin.close()
        process.wait(30)


if __name__ == "__main__":
    main()
