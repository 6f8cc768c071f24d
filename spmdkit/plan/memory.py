"""Memory of one device for one step: what the compiler reserves (`spmdkit.program.memory`), cut into parts that a user
knows.

The layout cuts the arguments into parameters, optimizer state and the rest. Gradients and activations are both
temporaries: gradients are counted from their layout, the rest is activations and work space. On a TPU arrays are padded
to whole tiles, which is its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from spmdkit.plan.hlo.liveness import Buffer, live_at_peak
from spmdkit.plan.hlo.text import Module
from spmdkit.program.memory import shard_bytes

if TYPE_CHECKING:
    from spmdkit.program.program import Program


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
    step, given = program.step_bytes, program.held
    gradients = min(_gradient_bytes(program), step.temp_bytes)
    parts = {
        **given.device,
        "padding of the state": step.argument_bytes - given.device_bytes,
        "gradients": gradients,
        "activations and work space": step.temp_bytes - gradients,
        "outputs": step.new_bytes,
        "code": step.code_bytes,
    }
    host = {**given.host, "temporaries": step.host_temp_bytes}
    return Memory(
        parts={name: n for name, n in parts.items() if n},
        host_parts={name: n for name, n in host.items() if n},
        argument_bytes=step.argument_bytes,
        output_bytes=step.output_bytes,
        alias_bytes=step.alias_bytes,
        temp_bytes=step.temp_bytes,
        code_bytes=step.code_bytes,
        peak_bytes=step.peak_bytes,
        live=live_at_peak(module, num_live),
    )


def _gradient_bytes(program: Program) -> int:
    """Returns the bytes of one gradient as the optimizer gets it, in the dtype that is added up."""
    context = program._step_context
    if context.sharding.placements is None:
        return 0
    params = jax.tree.leaves(program.abstract_state.params)
    specs = jax.tree.leaves(
        context.sharding.placements.gradient, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )
    shardings = [jax.sharding.NamedSharding(program.mesh, spec) for spec in specs]
    return sum(
        shard_bytes(x.shape, context.options.reduce_dtype or x.dtype, s) for x, s in zip(params, shardings, strict=True)
    )
