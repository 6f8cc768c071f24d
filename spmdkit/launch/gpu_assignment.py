"""Assigns GPUs to the processes of this machine: consecutive ones per process, since a JAX process takes most of the
memory of every GPU that it sees. A single process sees all GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


def gpus(env: Mapping[str, str], devices: Path = DEVICES) -> list[str]:
    """Returns the GPUs that a process with these variables would see, named as in CUDA_VISIBLE_DEVICES; empty if JAX is
    configured for other platforms."""
    platforms = env.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if VISIBLE in env:
        return [name.strip() for name in env[VISIBLE].split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    device_files = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(index) for index in range(len(device_files))]


def visible_gpus(seen: list[str], num_processes: int, process: int, each: int | None) -> dict[str, str]:
    """Returns the variable of one process: its share of `seen`, `each` GPUs or the same number for all processes; empty
    if there are too few GPUs."""
    share = each or len(seen) // num_processes
    if num_processes == 1 or not share or share * num_processes > len(seen):
        return {}
    return {VISIBLE: ",".join(seen[process * share : (process + 1) * share])}
