"""How long a job stands still after a kill, in process and by a restart; what copies in memory cost; goodput under
kills.

    python benchmarks/elastic_recovery.py in_process --kills 8 --every 12 --standby 2      recovery: SIGKILL of a random
    process to the next new step python benchmarks/elastic_recovery.py shrink | restart --kills 2 --every 20
    python benchmarks/elastic_recovery.py shrink --kills 1 --precompile        the step of three processes is in the
    compile cache
                                                                     when the first of four dies
    python benchmarks/elastic_recovery.py cost --width 2048                    seconds of a step with a copy, and
    without, in one
                                                                     run

Four processes of one device each on this machine, replicas of a small model (cost: cut over fsdp), with a compile cache
of their own. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from spmdkit.launch.process import start  # dies with this one

PROCESSES = 4
TASK = """
import os, time
import jax, jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

@sk.task
def task(width=256, wait=0.0):
    x = np.random.default_rng(0).normal(size=(960, 64)).astype(np.float32)

    def loss_fn(params, batch, key):
        h = jnp.tanh(jnp.tanh(batch["x"] @ params["a"]) @ params["b"])
        return sk.mean((h.sum(1) - batch["y"]) ** 2)

    def begin(run, step, state):
        with open(f"rank{run.cluster.process_index}", "w") as file:
            file.write(str(os.getpid()))

    def after(run, step, state, metrics):
        jax.block_until_ready(metrics)
        time.sleep(wait)
        if run.cluster.process_index == 0:
            with open("steps", "a") as file:
                file.write(f"{step} {time.time()}\\n")

    init = lambda key: {"a": jax.random.normal(key, (64, width)) / 8, "b": jax.random.normal(key, (width, width)) / width**0.5}
    return sk.Task(init, loss_fn, optax.adam(1e-3), train_data={"x": x, "y": np.sin(x.sum(1))}, hooks=[sk.Hook("clock", order=0, begin=begin, after_step=after)])
"""  # noqa: E501


def config(mode: str, every: int, standby: int, precompile: list[int]) -> str:
    alive = mode != "restart"
    told = f"in_process: true, snapshot_every: {every}, standby: {standby}, precompile: {precompile}"
    section = f"elastic: {{{told}}}\n" if alive else ""
    cut = "mesh: {fsdp: -1}\n" if mode == "cost" else "mesh: {data: -1}\n"
    return (
        f"task: task.py:task\nrun_dir: run\nsteps: 1000000\nbatch_size: 96\ndevices: cpu:4\n{cut}{section}checkpoint: {{every_steps: 100, keep: 2}}\n"  # noqa: E501
        "log: {every_steps: 1000, progress: plain}\n"
    )


def members(folder: Path, launcher: int) -> list[int]:
    """Returns the processes that train, by rank: those of the launcher's that have begun to; those that wait are
    none."""
    started = set(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    begun = [path.read_text() for path in sorted(folder.glob("rank*"))]
    return [int(pid) for pid in begun if pid in started]


def compiles_ahead(launcher: int) -> bool:
    """Returns whether a job runs that only compiles for another size: a launcher below the launcher."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return any(b"\0launch\0" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)


def steps_of(folder: Path) -> list[tuple[int, float]]:
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(when)) for step, when in (line.split() for line in lines if line.count(" ") == 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("in_process", "shrink", "restart", "cost"))
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument(
        "--every", type=float, default=15.0, help="seconds between the next new step after a kill and the next kill"
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--peer-every", type=int, default=10)
    parser.add_argument("--standby", type=int, default=0, help="processes that wait for a death")
    parser.add_argument(
        "--precompile", action="store_true", help="shrink: compile the step of one process less, before the first kill"
    )
    parser.add_argument("--wait", type=float, default=0.02, help="seconds that a step is made longer")
    parser.add_argument("--seconds", type=float, default=20.0, help="cost: how long")
    asked = parser.parse_args()
    if asked.precompile and (asked.mode != "shrink" or asked.kills != 1):
        parser.error("--precompile is of one size, which one death leads to. Try shrink --kills 1 --precompile.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        (folder / "run.yaml").write_text(
            config(asked.mode, asked.snapshot_every, asked.standby, [PROCESSES - 1] * asked.precompile)
        )
        sizes = "2:4" if asked.mode == "shrink" else "4:4"
        command = [
            sys.executable,
            "-m",
            "spmdkit",
            "launch",
            "-n",
            str(PROCESSES),
            "--max-restarts",
            "50",
            "--elastic",
            sizes,
            "--",
            "train",
            "run.yaml",
        ]
        settings = [f"task_args={{width: {asked.width}, wait: {asked.wait}}}"]
        with open(folder / "out", "w") as out:
            env = os.environ | {"SPMDKIT_COMPILE_CACHE": str(folder / "cache")}  # as of a job that is new here
            popen = start([*command, *settings], env, cwd=folder, stdout=out, stderr=out, start_new_session=True)
            threading.Thread(target=popen.wait, daemon=True).start()
            try:
                measured(asked, folder, popen)
            finally:
                popen.send_signal(signal.SIGTERM)
                time.sleep(1.0)
                os.killpg(popen.pid, signal.SIGKILL)
        if os.environ.get("SHOW"):
            print((folder / "out").read_text()[-6000:])
            print("\n".join(line[:200] for line in (folder / "run/events.jsonl").read_text().splitlines()))


def measured(asked: argparse.Namespace, folder: Path, popen: subprocess.Popen[bytes]) -> None:
    def reach(step: int, seconds: float = 120) -> float:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and popen.poll() is None:
            if (seen := steps_of(folder)) and max(s for s, _ in seen) >= step:
                return next(when for s, when in seen if s >= step)
            time.sleep(0.02)
        raise SystemExit(f"step {step} was not reached\n{(folder / 'out').read_text()[-3000:]}")

    if asked.mode == "cost":
        reach(2 * asked.snapshot_every)
        time.sleep(asked.seconds)
        seen = steps_of(folder)[2 * asked.snapshot_every :]
        took = [(s, b - a) for (_, a), (s, b) in itertools.pairwise(seen)]
        with_copy = [
            t for s, t in took if (s - 1) % asked.snapshot_every == 0
        ]  # the copy of step s - 1 is in the time of s
        without = [t for s, t in took if (s - 1) % asked.snapshot_every]
        kept = next(
            json.loads(line)
            for line in (folder / "run/events.jsonl").read_text().splitlines()
            if "snapshot_taken" in line
        )
        more = statistics.median(with_copy) - statistics.median(without)
        found = {"step_s": statistics.median(without), "copy_s": more, "bytes": kept["bytes"], "steps": len(took)}
        print(json.dumps({k: round(v, 4) for k, v in found.items()}))
        return
    rng, recovery, lost = random.Random(0), [], []
    for ahead in (True, False) if asked.precompile else ():  # it has begun, it has ended
        deadline = time.monotonic() + 120
        while compiles_ahead(popen.pid) != ahead:
            if time.monotonic() > deadline:
                raise SystemExit(f"what compiles ahead has not {'begun' if ahead else 'ended'}")
            time.sleep(0.02)
    reach(20)
    begun = time.time()
    first = max(s for s, _ in steps_of(folder))
    for _ in range(asked.kills):
        time.sleep(asked.every)
        last, killed = max(s for s, _ in steps_of(folder)), time.time()
        os.kill(rng.choice(members(folder, popen.pid)), signal.SIGKILL)
        time.sleep(0.3)
        last = max(s for s, _ in steps_of(folder))
        recovery.append(reach(last + 1) - killed)
        again = [s for s, when in steps_of(folder) if when > killed + 0.3]
        lost.append(last - min(again) + 1)
    time.sleep(asked.every)
    seen = steps_of(folder)
    good = [b - a for (s, a), (t, b) in itertools.pairwise(seen) if t == s + 1]
    new = max(s for s, _ in seen) - first
    print(
        json.dumps(
            {
                "mode": asked.mode,
                "precompiled": asked.precompile,
                "recovery_s": [round(x, 2) for x in recovery],
                "median_s": round(statistics.median(recovery), 2),
                "steps_repeated": lost,
                "goodput": round(new * statistics.median(good) / (time.time() - begun), 3),
                "kill_every_s": round((time.time() - begun) / asked.kills, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
