"""Memory of one device for one step: the bytes that the compiler reserves (`spmdkit.program.memory`), by part.

The layout divides the arguments into parameters, optimizer state and the rest. Gradients and activations are both
temporaries: gradient bytes are computed from the layout, the rest is activations and workspace. On a TPU arrays are
padded to full tiles; padding is a separate part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.foundation.trees import named_leaves
from spmdkit.plan.hlo.liveness import Buffer, live_at_peak
from spmdkit.plan.hlo.text import Module
from spmdkit.program.memory import StepBytes, shard_bytes

if TYPE_CHECKING:
    from spmdkit.program.program import Program


@dataclass(frozen=True, kw_only=True)
class Memory(StepBytes):
    """Bytes of one device (equal on all devices), by part.

    Attributes:
        parts: name -> bytes on the device; they add up to `peak_bytes`.
        host_parts: name -> bytes in the host's memory for this device.
        live: the largest buffers that are live at the peak, with their source lines.
    """

    parts: Mapping[str, int]
    host_parts: Mapping[str, int] = field(default_factory=dict)
    live: tuple[Buffer, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory for this device."""
        return sum(self.host_parts.values())


def read_memory(program: Program, module: Module) -> Memory:
    """Returns the memory of a program's compiled step."""
    step, input_bytes = program.step_bytes, program.input_bytes
    gradients = min(_gradient_bytes(program), step.temp_bytes)
    parts = {
        **input_bytes.device,
        "padding of the state": step.argument_bytes - input_bytes.device_bytes,
        "gradients": gradients,
        "activations and work space": step.temp_bytes - gradients,
        "outputs": step.new_bytes,
        "code": step.code_bytes,
    }
    host = {**input_bytes.host, "temporaries": step.host_temp_bytes}
    return Memory(
        **vars(step),
        parts={name: n for name, n in parts.items() if n},
        host_parts={name: n for name, n in host.items() if n},
        live=live_at_peak(module),
    )


def memory_without_program(program: Program) -> Memory:
    """Returns the memory of a step that the compiler rejected: its state from the layout, its temporaries from the
    message."""
    step, inputs = program.step_bytes, program.input_bytes.device["inputs"]
    work = {"gradients, activations and work space": step.temp_bytes}
    return Memory(**vars(step), parts={"state": step.argument_bytes - inputs, "inputs": inputs, **work})


def _gradient_bytes(program: Program) -> int:
    """Returns the bytes of one gradient as the optimizer receives it, in the dtype of accumulation."""
    context = program._step_context
    if context.sharding.placements is None:
        return 0
    params = named_leaves(program.abstract_state.params)
    specs = jax.tree.leaves(context.sharding.placements.gradient, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return sum(
        shard_bytes(x.shape, context.options.gradient_dtype or x.dtype, NamedSharding(program.mesh, spec))
        for (path, x), spec in zip(params, specs, strict=True)
        if path not in context.options.roles
    )
