"""Saves of spmdkit next to those of orbax alone, in alternating pairs.

    python benchmarks/checkpoints.py [--leaves 200] [--mib 64] [--repeats 15] [--intervals 3]

Time for which a save blocks the loop, bandwidth until the save is committed (orbax's `AsyncCheckpointer` and
`CheckpointManager`), and the share of wall time that saves block when a run of 100 ms per step saves every 100 steps.
Goals: ratio 1.05, share 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from results import interval, is_met, save

from spmdkit.checkpoint import Checkpoints
from spmdkit.config.retention import Retention

RATIO, SHARE = 1.05, 0.01


def measure(directory: Path, state: Any, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds that each save blocked, and until it was committed, after one unmeasured save, in turns:
    spmdkit and two ways of orbax.

    `async_checkpointer` is the least that orbax does; `checkpoint_manager` is what its users call.
    """
    ours = Checkpoints(directory / "spmdkit", retention=Retention(keep=2))
    bare = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler()))
    policy = ocp.checkpoint_managers.LatestN(2)
    manager = ocp.CheckpointManager(
        directory / "manager", options=ocp.CheckpointManagerOptions(preservation_policy=policy)
    )
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
    saves: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
        "spmdkit": (lambda step: ours.save(step, state, {"seed": 0}, {"loss": 1.0}), ours.wait),
        "async_checkpointer": (lambda step: bare.save(directory / "bare" / str(step), args), bare.wait_until_finished),
        "checkpoint_manager": (lambda step: manager.save(step, args=args), manager.wait_until_finished),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    for step in range(repeats + 1):
        order = list(saves)[step % 3 :] + list(saves)[: step % 3]
        for name in order:
            save, wait = saves[name]
            start = time.perf_counter()
            save(step)
            blocked = time.perf_counter() - start
            wait()
            times[name].append((blocked, time.perf_counter() - start))
        shutil.rmtree(directory / "bare" / str(step))
    for closing in (ours, bare, manager):
        closing.close()
    return {name: values[1:] for name, values in times.items()}


def many_leaves(num_leaves: int, num_mib: int) -> dict[str, jax.Array]:
    size = max(1, num_mib * 2**20 // 4 // num_leaves)
    keys = jax.random.split(jax.random.key(0), num_leaves)
    return {f"layer_{i}": jax.random.normal(keys[i], (size,)) for i in range(num_leaves)}


def blocked_share(directory: Path, state: Any, intervals: int) -> float:
    """Returns the share of wall time in which saves block a run of 100 ms per step that saves every 100 steps."""
    checkpoints, blocked = Checkpoints(directory / "share", retention=Retention(keep=2)), 0.0
    begin = time.perf_counter()
    for step in range(1, 100 * intervals + 1):
        time.sleep(0.1)
        if step % 100 == 0:
            start = time.perf_counter()
            checkpoints.save(step, state, {"seed": 0}, {"loss": 1.0})
            blocked += time.perf_counter() - start
    wall = time.perf_counter() - begin
    checkpoints.close()
    return blocked / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=200)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--intervals", type=int, default=3, help="saves of the run of 100 ms per step")
    options = parser.parse_args()
    state = {"params": jax.block_until_ready(many_leaves(options.leaves, options.mib)), "step": jnp.int32(1)}
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), state, options.repeats)
        share = blocked_share(Path(folder), state, options.intervals)
    rows: list[dict[str, Any]] = []
    for name in ("async_checkpointer", "checkpoint_manager"):
        for i, what in enumerate(("blocks the loop", "until committed")):
            ours, theirs = ([pair[i] for pair in times[key]] for key in ("spmdkit", name))
            ratio = interval([a / b for a, b in zip(ours, theirs, strict=True)])
            seconds = [statistics.median(values) for values in (ours, theirs)]
            row = {"what": f"{what}, next to `{name}`", "spmdkit, ms": 1e3 * seconds[0], "orbax, ms": 1e3 * seconds[1]}
            if i:
                row |= {"spmdkit, MiB/s": options.mib / seconds[0], "orbax, MiB/s": options.mib / seconds[1]}
            rows.append(row | {"ratio": ratio, "goal": f"{RATIO}", "met": is_met(ratio, RATIO)})
    what = "share of wall time blocked, a save every 100 steps of 100 ms"
    rows.append({"what": what, "ratio": share, "goal": f"{SHARE}", "met": share <= SHARE})
    sizes = f"--leaves {options.leaves} --mib {options.mib} --repeats {options.repeats}"
    save("checkpoints", rows, f"python benchmarks/checkpoints.py {sizes} --intervals {options.intervals}")
    print(json.dumps({"benchmark": "checkpoints", "rows": rows}))


if __name__ == "__main__":
    main()
