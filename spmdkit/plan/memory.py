"""Memory of one device for one step: what the compiler reserves, cut into parts that a user knows.

    peak = arguments + outputs that are no donated argument + temporaries + code

all of which are allocated while the step runs (the state is donated, so the new state lies in the old one's place). The
compiler says the four sums (`compiled.memory_analysis()`, read by `compiler.temp_bytes`); the layout cuts the arguments
into parameters, optimizer state and the rest. Gradients and activations are both temporaries: gradients are counted from
their layout, the rest is activations and work space. On a TPU arrays are padded to whole tiles, which is a part of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from spmdkit import compiler
from spmdkit.plan.hlo import Module
from spmdkit.plan.liveness import Buffer, live_at_peak

if TYPE_CHECKING:
    from spmdkit.program import Program

_FIELDS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "model_state": "model state",
    "ema": "parameter average",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device (the same on each).

    Attributes:
        parts: name -> bytes on the device; they add up to `peak_bytes`.
        host_parts: name -> bytes in the host's memory for this device.
        argument_bytes: the state and the batch, as the compiler lays them out.
        output_bytes: new arrays that come out.
        alias_bytes: outputs that lie in a donated argument's place.
        temp_bytes: gradients, activations and work space at their largest.
        code_bytes: the program itself, where it lives in the device's memory.
        peak_bytes: all that is allocated while the step runs.
        live: the largest buffers that are alive when most is, with their source lines.
    """

    parts: Mapping[str, int]
    host_parts: Mapping[str, int]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    live: tuple[Buffer, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory for this device."""
        return sum(self.host_parts.values())


def read_memory(program: Program, module: Module, num_live: int = 12) -> Memory:
    """Returns the memory of a program's compiled step."""
    stats = program.compiled.memory_analysis()
    assert stats is not None, "this backend has no memory analysis"
    device, host = _state_parts(program)
    all_on_device = stats.host_argument_size_in_bytes == 0 and bool(host)
    argument_bytes = stats.argument_size_in_bytes
    host_bytes = sum(host.values())
    if all_on_device:  # the CPU backend counts host memory as its own
        argument_bytes -= host_bytes
    device["inputs"] = _batch_bytes(program)
    argument_bytes = max(
        argument_bytes, sum(device.values())
    )  # a leaf that the step never reads is no argument, but is there
    padding = argument_bytes - sum(device.values())
    temp_bytes = compiler.temp_bytes(stats, program.mesh.devices.flat[0].platform)
    gradients = min(_gradient_bytes(program), temp_bytes)
    alias = stats.alias_size_in_bytes - (host_bytes if all_on_device else 0)
    outputs = max(stats.output_size_in_bytes - (host_bytes if all_on_device else 0) - alias, 0)
    parts = {name: n for name, n in device.items() if n}
    parts |= {
        "padding of the state": padding,
        "gradients": gradients,
        "activations and work space": temp_bytes - gradients,
        "outputs": outputs,
        "code": stats.generated_code_size_in_bytes,
    }
    if stats.host_temp_size_in_bytes:
        host["temporaries"] = stats.host_temp_size_in_bytes
    return Memory(
        parts={name: n for name, n in parts.items() if n},
        host_parts=host,
        argument_bytes=argument_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=alias,
        temp_bytes=temp_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        peak_bytes=argument_bytes + outputs + temp_bytes + stats.generated_code_size_in_bytes,
        live=live_at_peak(module, num_live),
    )


def _state_parts(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for p in program.layout:
        name = _FIELDS.get(p.path.split("/", 1)[0], "counters")
        where = device if p.memory_kind == "device" else host
        where[name] = where.get(name, 0) + shard_bytes(p.shape, p.dtype, p.sharding(program.mesh))
    return device, host


def _batch_bytes(program: Program) -> int:
    return sum(shard_bytes(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(program.abstract_batch))


def _gradient_bytes(program: Program) -> int:
    """Returns the bytes of one gradient as the optimizer gets it, in the dtype that is added up."""
    record = program._step_record
    if record.placements is None:
        return 0
    params = jax.tree.leaves(program.abstract_state.params)
    specs = jax.tree.leaves(record.placements.gradient, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    shardings = [jax.sharding.NamedSharding(program.mesh, spec) for spec in specs]
    return sum(shard_bytes(x.shape, record.reduce_dtype or x.dtype, s) for x, s in zip(params, shardings, strict=True))


def shard_bytes(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> int:
    """Returns the bytes of one device's shard of an array."""
    dtype = dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
    return math.prod(sharding.shard_shape(tuple(shape))) * dtype.itemsize
