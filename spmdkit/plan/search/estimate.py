"""`estimate`: the time of a step by an analytic model, without compilation; it orders the candidates of a search.

    arithmetic    FLOPs of the step / devices, 1.05 to 1.33 times that with remat
    memory        three times the state: the update reads and writes it, and the passes move parameters and gradients
    host          offloaded state, from the host and back
    replica, data one reduction of the gradient                              (plan/lower_bound.py)
    fsdp          gathers of the parameters in each microbatch, and one scatter
    tensor        activations reduced once for each pair of sharded matrices, forward and backward
    others        the collectives that the traced step contains over context, expert and pipeline

A search multiplies all estimates by one factor, so that they have the unit of the compiled candidates (search.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdkit.mesh.chips import Chip
from spmdkit.mesh.mesh import AXES, REPLICA_AXES, dim_axes
from spmdkit.plan.document import tokens_of_batch
from spmdkit.plan.flops import collective_bytes
from spmdkit.plan.flops import count as count_flops
from spmdkit.plan.lower_bound import lower_bound_bytes
from spmdkit.plan.machine.links import link_path
from spmdkit.plan.machine.target import Target
from spmdkit.program.memory import shard_bytes
from spmdkit.program.program import Program

_REMAT_COST = {
    "none": 1.0, "dots": 1.05, "dots_no_batch": 1.1, "minimal_flash": 1.05, "minimal": 1.1, "save_dot_except_mlp": 1.2,
    "save_qkv_proj": 1.25, "offload_layer_inputs": 1.33, "full": 1.33,
}  # fmt: skip
"""Arithmetic of a step / without recomputation."""


@dataclass(frozen=True)
class Estimate:
    """What a step of one program costs a device, from which the costs with other settings follow.

    Attributes:
        batch_size: of the program.
        compute: its compute dtype.
        flops: dtype -> FLOPs of products without recomputation.
        state_bytes: train state in device memory; `host_bytes`: in host memory.
        optimizer_bytes: the part of `state_bytes` that `offload: [optimizer]` moves to the host.
        reduction_s: the reduction of the gradient over replicas.
        activations_s: collectives of activations.
        gathers_s: collectives of the parameters, in each microbatch.
    """

    batch_size: int
    compute: str
    flops: Mapping[str, float]
    state_bytes: int
    host_bytes: int
    optimizer_bytes: int
    reduction_s: float
    activations_s: float
    gathers_s: float

    def seconds(self, chip: Chip, batch_size: int, microbatches: int, remat: Any, compute: str, offload: bool) -> float:
        """Returns the estimated time of a step; `offload`: the optimizer state is moved to the host."""
        rows = batch_size / self.batch_size
        width = np.dtype(compute).itemsize / np.dtype(self.compute).itemsize
        cost = _REMAT_COST.get(remat, 1.1) if isinstance(remat, str) else 1.1
        flops = {compute if dtype == self.compute else dtype: cost * rows * num for dtype, num in self.flops.items()}
        on_host = self.host_bytes + self.optimizer_bytes * offload
        memory_s = 3 * (self.state_bytes + self.host_bytes) / (chip.memory_bytes_per_s * chip.efficiency.memory)
        return (
            chip.products_s(flops)
            + memory_s
            + 2 * on_host / chip.host_link.bytes_per_s
            + self.reduction_s
            + width * (rows * self.activations_s + microbatches * self.gathers_s)
        )


def estimate(program: Program, target: Target) -> Estimate:
    """Returns the costs of a program with one microbatch and without remat."""
    num, arithmetic = program.mesh.devices.size, count_flops(program.traced.jaxpr)
    by_dtype = arithmetic.by_dtype or {"float32": arithmetic.elementwise}
    sent = lower_bound_bytes(program)
    others = collective_bytes(program.traced.jaxpr, ("context", "expert", "pipeline"))
    activations = {("tensor",): _tensor_bytes(program)} | {axes: n / num for axes, n in others.items()}
    device_optimizer = [
        shard_bytes(leaf.shape, leaf.dtype, leaf.sharding(program.mesh))
        for leaf in program.layout
        if leaf.path.startswith("opt_state") and "optimizer" not in program.config.offload
    ]
    return Estimate(
        program.config.largest_batch,
        program.config.precision.compute,
        {dtype: flops / num for dtype, flops in by_dtype.items()},
        program.input_bytes.state_bytes,
        program.input_bytes.host_bytes,
        sum(device_optimizer),
        _over(target, program, REPLICA_AXES, sent.get("replica x data", 0)),
        sum(_over(target, program, axes, num_bytes) for axes, num_bytes in activations.items()),
        _over(target, program, ("fsdp",), sent.get("fsdp", 0)),
    )


def _over(target: Target, program: Program, axes: Sequence[str], num_bytes: float) -> float:
    """Returns the seconds in which a device sends `num_bytes` to the devices that differ from it along the axes."""
    places = np.arange(program.mesh.size).reshape(program.mesh.devices.shape)
    group = places[tuple(slice(None) if axis in axes else 0 for axis in AXES)].ravel()
    if not num_bytes or group.size < 2:
        return 0.0
    path = link_path(target, list(program.mesh.devices.flat), group.tolist())
    return path.seconds(num_bytes, "all_reduce", group.size)


def _tensor_bytes(program: Program) -> float:
    """Returns the activation bytes that a device reduces due to tensor sharding: for a pair of matrices, once forward
    and once backward."""
    t = program.sizes["tensor"]
    if t == 1:
        return 0.0
    rows = (tokens_of_batch(program) or program.config.largest_batch) / program.batch_shards
    width = 2 if program.config.precision.compute == "bfloat16" else 4
    total = 0.0
    for leaf in program.layout:
        sharded = [i for i, dim in enumerate(leaf.spec) if "tensor" in dim_axes(dim)]
        if not leaf.path.startswith("params") or not sharded or len(leaf.shape) < 2:
            continue
        layers = leaf.shape[0] if len(leaf.shape) > 2 and leaf.spec[0] is None else 1
        unsharded = [n for i, n in enumerate(leaf.shape) if i not in sharded and not (i == 0 and layers > 1)]
        total += layers * rows * max(unsharded, default=1) * width
    return total * 2 * (t - 1) / t
