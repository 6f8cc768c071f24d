"""How long the training loop stands still while a save starts: spmdkit against orbax alone, paired.

python benchmarks/checkpoint_blocking.py [--leaves 200] [--mib 64] [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1])]

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from spmdkit.checkpoint import Checkpoints
from spmdkit.config.retention import Retention


def blocked_s(directory: Path, state: Any, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds that each save blocked, after one unmeasured save, in turns: spmdkit and two ways of orbax.

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
    times: dict[str, list[float]] = {name: [] for name in saves}
    for step in range(repeats + 1):
        order = list(saves)[step % 3 :] + list(saves)[: step % 3]
        for name in order:
            save, wait = saves[name]
            start = time.perf_counter()
            save(step)
            times[name].append(time.perf_counter() - start)
            wait()
        shutil.rmtree(directory / "bare" / str(step))
    for closing in (ours, bare, manager):
        closing.close()
    return {name: values[1:] for name, values in times.items()}


def many_leaves(num_leaves: int, num_mib: int) -> dict[str, jax.Array]:
    size = max(1, num_mib * 2**20 // 4 // num_leaves)
    keys = jax.random.split(jax.random.key(0), num_leaves)
    return {f"layer_{i}": jax.random.normal(keys[i], (size,)) for i in range(num_leaves)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=200)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    state = jax.block_until_ready(many_leaves(asked.leaves, asked.mib))
    with tempfile.TemporaryDirectory() as folder:
        times = blocked_s(Path(folder), {"params": state, "step": jnp.int32(1)}, asked.repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        f"ratio_to_{name}": statistics.median(a / b for a, b in zip(times["spmdkit"], times[name], strict=True))
        for name in medians
        if name != "spmdkit"
    }
    print(json.dumps({"leaves": asked.leaves, "mib": asked.mib, "blocked_s": medians, **ratios}))


if __name__ == "__main__":
    main()
