"""`check_memory`: whether a task is small enough for fake devices, which share this machine's memory."""

from __future__ import annotations

from pathlib import Path

import jax

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.trees import tree_bytes
from spmdkit.foundation.user_code import call_user
from spmdkit.program.task import Task

COPIES = 6
"""Copies of the parameters per device: parameters, gradient, two moments, the recorded gradient and update. Activations
are small."""

MEMINFO = Path("/proc/meminfo")


def check_memory(task: Task, num_devices: int, jobs: int) -> None:
    """Rejects a task with a state that, complete on every fake device of every process, exceeds the free memory."""
    free = available_bytes()
    params = tree_bytes(call_user(lambda: jax.eval_shape(task.init, jax.random.key(0)), "init"))
    needed = COPIES * params * num_devices * jobs
    if free is not None and needed > free:
        raise ConfigError(
            f"verify runs the complete task on {num_devices} fake devices in {jobs} process{'es' * (jobs > 1)}: "
            f"parameters of {format_bytes(params)} need about {format_bytes(needed)}, {format_bytes(free)} are free. "
            "A small model has the same mathematics. Shrink it by overrides, for example task_args.width=64 "
            "task_args.layers=2, or use --jobs 1 and fewer --devices."
        )


def available_bytes() -> int | None:
    """Returns the memory that new processes can use without swapping, or None if the system does not report it."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
