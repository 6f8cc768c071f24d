"""Does the order in which `plan` puts meshes agree with the clock? Six meshes of a GPT on 8 fake CPU devices,
calibrated.

    python benchmarks/plan_ranking.py [--steps 10] [--width 128]

Prints predicted and measured seconds of a step for each mesh, and Spearman's rank correlation of the two. Measured is
the median of rounds in which the meshes take turns, so that other load on the machine falls on all of them.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("NPROC", "16")
os.environ.setdefault("SPMDKIT_RATES", str(Path(tempfile.mkdtemp()) / "rates.json"))

import jax

jax.config.update("jax_num_cpu_devices", 8)

import spmdkit as sk
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.calibrate import calibrate, describe, with_measured
from spmdkit.plan.machine.target import target_of

CONFIG = Path(__file__).parents[1] / "configs" / "one_device.yaml"
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "fsdp": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
)


def ranks(values: list[float]) -> list[int]:
    """Returns the place of each value in ascending order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def spearman(a: list[float], b: list[float]) -> float:
    """Returns the rank correlation of two lists without ties."""
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True)) / (n * (n**2 - 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="rounds that are measured")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    devices = jax.devices()
    print(describe(calibrate(devices)))
    target, call_s = with_measured(target_of(devices))
    predicted, running = [], []
    for mesh in MESHES:
        size = ", ".join(f"{a}: {n}" for a, n in mesh.items())
        overrides = ["devices=cpu:8", f"mesh={{{size}}}", f"task_args.width={arguments.width}", "task_args.heads=8"]
        overrides += [f"batch_size={arguments.batch}", "task_args.train_bytes=200000", "task_args.eval_bytes=4160"]
        program = sk.build(CONFIG, overrides=overrides)
        predicted.append(plan_program(program, target, call_s)["predicted_step_s"])
        _, batch = next(iter(program.batches()))
        running.append([program, program.init(), batch])
    times: list[list[float]] = [[] for _ in MESHES]
    for turn in range(arguments.steps + 2):
        for number, (program, state, batch) in enumerate(running):
            begin = time.perf_counter()
            state, _ = program.step(state, batch)
            jax.block_until_ready(state)
            running[number][1] = state
            if turn >= 2:
                times[number].append(time.perf_counter() - begin)
    measured = [statistics.median(t) for t in times]
    print(f"{'mesh':32}{'predicted':>12}{'measured':>12}")
    for mesh, p, m in zip(MESHES, predicted, measured, strict=True):
        print(f"{' x '.join(f'{a} {n}' for a, n in mesh.items()):32}{p * 1e3:>9.1f} ms{m * 1e3:>9.1f} ms")
    print(f"rank correlation (Spearman) {spearman(predicted, measured):.2f}")


if __name__ == "__main__":
    main()
