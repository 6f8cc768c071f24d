"""Names that several packages share: mesh axes, logical axes, `cpu:N`, environment variables, keys of metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Mapping

AXES = ("replica", "data", "pipeline", "fsdp", "expert", "context", "tensor")
"""All mesh axes, slowest links first: neighbors along `tensor` are the closest devices."""

REPLICA_AXES = ("replica", "data")
MODEL_AXES = tuple(axis for axis in AXES if axis not in REPLICA_AXES)
BATCH_AXES = ("replica", "data", "fsdp", "expert")
"""The axes that shard the examples of a batch, in row order."""

LOGICAL_AXES: Mapping[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
    "expert_embed": ("fsdp",),
    "layers": ("pipeline",),
    "sequence": ("context",),
    "norm_sequence": ("context", "tensor"),
}
"""Logical dim name -> mesh axes, before `layout.axes` is added."""

MAX_FAKE_DEVICES = 4096


STEPS_IN_FLIGHT = 16
"""The number of steps that a training loop dispatches before it waits for the oldest."""


def fake_devices(text: str) -> int | None:
    """Returns N of `cpu:N`, the number of fake CPU devices from 1 to MAX_FAKE_DEVICES; None for any other value."""
    kind, _, count = text.partition(":")
    if kind != "cpu" or not count.isascii() or not count.isdigit() or len(count) > 9:
        return None
    return int(count) if 1 <= int(count) <= MAX_FAKE_DEVICES else None


_STEP = re.compile(r"0|[1-9][0-9]{0,17}")


def is_step_name(name: str) -> bool:
    """Returns whether a folder of this name is a step or another number of spmdkit."""
    return _STEP.fullmatch(name) is not None


COORDINATOR = "SPMDKIT_COORDINATOR"
NUM_PROCESSES = "SPMDKIT_NUM_PROCESSES"
PROCESS_ID = "SPMDKIT_PROCESS_ID"
DEVICES_PER_PROCESS = "SPMDKIT_DEVICES_PER_PROCESS"
RENDEZVOUS_TIMEOUT_S = "SPMDKIT_RENDEZVOUS_TIMEOUT_S"
SERVICE = "SPMDKIT_SERVICE"
"""The address of JAX's coordination service if a launcher runs it. The launcher also reserves the port of COORDINATOR.
"""

ERROR_FILE = "SPMDKIT_ERROR_FILE"
"""The file into which a failing process writes its message, for the launcher."""

BEAT_FILE = "SPMDKIT_BEAT_FILE"
"""The file into which a process writes several times a second while its interpreter runs, for the launcher."""

DEATHS_FILE = "SPMDKIT_DEATHS_FILE"
"""The file in which the launcher lists the dead processes and their exit reasons."""

STEP_FILE = "SPMDKIT_STEP_FILE"
"""The file with the number of the last dispatched step of a process, for the launcher."""

MEMBERSHIP_FILE = "SPMDKIT_MEMBERSHIP_FILE"
"""The file in which the launcher lists the processes of the next generation (launch/membership_file.py)."""

READY_FILE = "SPMDKIT_READY_FILE"
"""The file in which a process publishes the generation for which it is ready."""

MEMBER, GENERATION = "SPMDKIT_MEMBER", "SPMDKIT_GENERATION"
"""The number that the launcher assigned to a process, and the generation for which it was started."""

COMPILE_CACHE = "SPMDKIT_COMPILE_CACHE"
"""off: no compile cache; otherwise its folder, unless the config names one."""

COMPILE_ONLY = "SPMDKIT_COMPILE_ONLY"
"""Makes `train` exit after the compilation of its step, to fill the compile cache for another number of processes
(launch/precompile.py)."""

GPU_COMPILER = "SPMDKIT_GPU_COMPILER"
"""Set in a process that loads XLA's GPU compiler for a machine without a GPU (plan/machine/compiler_process.py)."""

DRILL_FILE = "SPMDKIT_DRILL_FILE"
"""The file in which a drill requests a fault of one process, and the process reports its injection."""

PLAN_THREAD = "spmdkit plan"
"""The name of the thread that writes the plan of a run."""

NAMELESS = "/dev/fd/"
"""Prefix of the path of an inherited file descriptor for a file without a name on disk."""

OUR_VARIABLES = frozenset(
    [value for value in dict(vars()).values() if isinstance(value, str) and value.startswith("SPMDKIT_")]
    + ["SPMDKIT_ALLOCATOR", "SPMDKIT_RATES"]
)
"""All environment variables of spmdkit."""

SPEED = ("examples_per_s", "step_time_s", "input_wait_s")
MEASURED = (*SPEED, "tokens_per_s", "mfu", "peak_memory_bytes", "goodput")
"""Keys of measurements in each line of metrics.jsonl. A metric of the task replaces one that is not in `SPEED`."""

RESERVED_METRICS = ("step", "split", *SPEED)
"""Reserved keys of metrics.jsonl, which a task's metrics must not use."""
