"""What only the TPU compiler writes: its estimate of cycles, and two forms of collectives.

*Spread over fusions* (async collective fusion): a collective that overlaps with products is written into each fusion
that it overlaps with, every time with the same chain and an `async_collective_fusion_config`: in the first with a
custom call `AsyncCollectiveStart`, in the last with `AsyncCollectiveDone`. It is sent once: the first counts. Several
chains may share a channel.

*Between slices* (megascale): a `send` to the host with `_xla_megascale_transfer_type="ALL_REDUCE"` and its `recv`. Each
device exchanges data with the devices at its position in the other slices
(`_xla_megascale_target="{1,2}x{0:3}"`: slices x devices).
"""

from __future__ import annotations

import re

import numpy as np

from spmdkit.plan.hlo.groups import Groups
from spmdkit.plan.hlo.text import Instruction, Module

_TRANSFERS = {
    "ALL_REDUCE": "all_reduce",
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_TO_ALL": "all_to_all",
}


def is_spread(i: Instruction) -> bool:
    """Returns whether an instruction is one part of a collective that is spread over fusions."""
    return "async_collective_fusion_config" in i.backend_config


def is_continued(module: Module, i: Instruction) -> bool:
    """Returns whether an instruction continues a collective that was started, and counted, in an earlier fusion."""
    starts = 'custom_call_target="AsyncCollectiveStart"'
    return is_spread(i) and not any(starts in other.attributes for other in module.around(i).instructions)


def chain_of(i: Instruction) -> str:
    """Returns what identifies a spread collective: its chain, or its channel."""
    match = re.search(r'chain_id="(\d+)"', i.attributes)
    return f"chain {match[1]}" if match else f"channel {i.attribute('channel_id')}"


def ended_chain(module: Module, i: Instruction) -> str | None:
    """Returns the chain of the spread collective that a fusion waits for, or None."""
    inside = module.fused(i).instructions if i.opcode == "fusion" else ()
    if any('custom_call_target="AsyncCollectiveDone"' in other.attributes for other in inside):
        return next((chain_of(other) for other in inside if is_spread(other)), None)
    return None


def estimated_cycles(i: Instruction) -> int | None:
    """Returns the compiler's estimate of the cycles that an instruction takes, or None. The largest int64 is none."""
    match = re.search(r'"estimated_cycles":"?(\d+)', i.attributes)
    return int(match[1]) if match and int(match[1]) < 2**62 else None


def between_slices(i: Instruction, num_devices: int) -> tuple[str, Groups] | None:
    """Returns (op, groups) of a `send` that is a collective between slices, or None."""
    if i.opcode != "send" or "_xla_megascale_transfer_type" not in i.attributes:
        return None
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
    target = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', i.attributes)
    ranges = (part.partition(":") for part in (target[1] if target else "").split(","))  # `1,2`, `0:3`: inclusive
    num_slices = max(2, sum(int(last) - int(first) + 1 if last else 1 for first, _, last in ranges))
    peers = np.arange(num_devices).reshape(num_slices, -1).T.tolist()
    op = _TRANSFERS.get(transfer[1] if transfer else "", "collective_permute")
    return op, tuple(tuple(row[:2] if op == "collective_permute" else row) for row in peers)
