"""`step_bytes`: the memory of one device while a step runs. `auto`, a plan and the start of a run use the same formula.

    peak = arguments + outputs that are not donated arguments + temporaries + code

The compiler reports the four terms (`compiled.memory_analysis()`). Arguments are at least the bytes of the layout: a
leaf that the step never reads is not an argument. The CPU backend counts host memory as device memory; it is
subtracted.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from spmdkit.foundation.exhausted_memory import is_exhausted
from spmdkit.foundation.trees import leaf_bytes
from spmdkit.mesh import layout
from spmdkit.mesh.chips import chip_of_device_kind
from spmdkit.program import compiler

_FIELDS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "model_state": "model state",
    "ema": "parameter average",
    "reducer": "reducer's state",
    "sync": "sync's state",
}


class InputBytes(NamedTuple):
    """The inputs of a step, from the layout: name -> bytes, on one device and in host memory for that device."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Bytes per device."""
        return sum(self.device.values())

    @property
    def state_bytes(self) -> int:
        """Bytes per device, without the batch."""
        return self.device_bytes - self.device.get("inputs", 0)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory for this device."""
        return sum(self.host.values())


def input_bytes(leaves: Sequence[layout.LeafPlacement], mesh: Mesh, batch: Any = None) -> InputBytes:
    """Returns the bytes of the train state, and those of an abstract batch as `inputs`."""
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for leaf in leaves:
        name = _FIELDS.get(leaf.path.split("/", 1)[0], "counters")
        where = device if leaf.memory_kind == "device" else host
        where[name] = where.get(name, 0) + shard_bytes(leaf.shape, leaf.dtype, leaf.sharding(mesh))
    if batch is not None:
        device["inputs"] = sum(shard_bytes(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(batch))
    return InputBytes(device, host)


def shard_bytes(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> int:
    """Returns the bytes of one device's shard of an array."""
    return leaf_bytes(jax.ShapeDtypeStruct(sharding.shard_shape(tuple(shape)), dtype))


@dataclass(frozen=True)
class StepBytes:
    """Bytes per device; all devices are equal.

    Attributes:
        argument_bytes: the state and the batch in the compiler's layout.
        output_bytes: new arrays.
        alias_bytes: outputs that reuse the memory of a donated argument.
        temp_bytes: maximum of gradients, activations and workspace.
        code_bytes: the program, if it is in device memory.
        host_temp_bytes: temporaries in host memory.
        refused: the compiler's message if it rejected the step for its size. `temp_bytes` is then the size in the
            message, or 0.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int = 0
    host_temp_bytes: int = 0
    refused: str = ""

    @property
    def new_bytes(self) -> int:
        """Outputs that are not donated arguments."""
        return max(self.output_bytes - self.alias_bytes, 0)

    @property
    def peak_bytes(self) -> int:
        """All memory allocated while the step runs."""
        return self.argument_bytes + self.new_bytes + self.temp_bytes + self.code_bytes

    def fits(self, limit_bytes: int | None) -> bool:
        """Returns whether the step can run with this limit per device; None: unknown, always true."""
        return not self.refused and (limit_bytes is None or self.peak_bytes <= limit_bytes)


def step_bytes(make: Callable[[], jax.stages.Compiled], given: InputBytes, platform: str) -> StepBytes:
    """Returns the memory of one device while a step runs, from the compiled step, the state and the batch."""
    try:
        stats = make().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        state, needed = given.state_bytes, _needed(str(error))
        return StepBytes(given.device_bytes, state, state, needed, refused=str(error))
    assert stats is not None, "this backend does not report the memory of its programs"
    elsewhere = 0 if stats.host_argument_size_in_bytes else given.host_bytes
    return StepBytes(
        argument_bytes=max(stats.argument_size_in_bytes - elsewhere, given.device_bytes),
        output_bytes=stats.output_size_in_bytes - elsewhere,
        alias_bytes=stats.alias_size_in_bytes - elsewhere,
        temp_bytes=compiler.temp_bytes(stats, platform),
        code_bytes=stats.generated_code_size_in_bytes,
        host_temp_bytes=stats.host_temp_size_in_bytes,
    )


def _needed(text: str) -> int:
    """Returns the bytes that the compiler's message requires: the largest number before the limit."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
    sizes = [float(n) * units[unit] for n, unit in re.findall(r"([\d.]+)([KMGT]?)\)? (?:exceeds|of)", text)]
    sizes += [float(n) * units[unit] for n, unit in re.findall(r"\(([\d.]+)([KMGT]?)\)", text)[:1]]
    return int(max(sizes, default=0))


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Returns a device's memory for a program: from the backend, a share of the machine (CPU), or the chip's size."""
    first = devices[0]
    if first.platform == "cpu":
        local = sum(d.process_index == jax.process_index() for d in devices)
        return int(memory_of_this_machine() // max(1, local))
    device = next((d for d in devices if hasattr(d, "memory_stats") and d.process_index == jax.process_index()), None)
    try:
        stats = device.memory_stats() if device is not None else None
    except jax.errors.JaxRuntimeError:  # an abstract device
        stats = None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    chip = chip_of_device_kind(first.device_kind, first.platform)
    return None if chip is None else chip.limit_bytes


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Returns the most bytes that a device of this process has held; on CPU, that this process has held. None if the
    backend does not count them."""
    if devices[0].platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    local = [d.memory_stats() or {} for d in devices if d.process_index == jax.process_index()]
    return max((stats["peak_bytes_in_use"] for stats in local if "peak_bytes_in_use" in stats), default=None)


def memory_of_this_machine() -> int:
    """Returns the bytes of main memory that this process may use: the machine's, or less by `ulimit -v` or its control
    group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    limits += [address_space] * (address_space != resource.RLIM_INFINITY)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # absent, or `max`
            limits.append(int(Path(path).read_text()))
    return min(limits)
