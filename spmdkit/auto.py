"""`microbatches: auto` and `remat: auto`: the mildest step whose compiled memory fits the device.

Nothing runs and nothing runs out of memory: each candidate is compiled, and the compiler says what it needs. Memory falls with the
number of microbatches, so the smallest that fits is found by halving; less is kept for the backward pass (remat: none, dots,
full) only where no number of microbatches is enough, since that costs arithmetic: about a third more at `full`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from spmdkit import compiler
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.hardware import chip_of_device_kind
from spmdkit.words import format_bytes

if TYPE_CHECKING:
    from spmdkit.program import Program

REMATS = ("none", "dots", "full")
"""Remat policies from the most memory to the least."""
REFUSED = 2**62
"""Stands for the bytes of a step that the compiler refuses for its size."""
MOST_MICROBATCHES = 64


def is_auto(config: Config) -> bool:
    """Returns whether a config leaves something to be chosen by memory."""
    return "auto" in (config.microbatches, config.remat)


def choose(
    config: Config, batch_shards: int, limit_bytes: int | None, make: Callable[[Mapping[str, Any]], Program]
) -> Program:
    """Returns the program of the first choice that fits, compiled.

    Args:
        batch_shards: parts into which the mesh cuts a batch.
        limit_bytes: of one device; None where nobody knows, and everything fits.
        make: the program of a config with some keys changed.

    Raises:
        ConfigError: no choice fits; says what the smallest needs.
    """
    remats = REMATS if config.remat == "auto" else (config.remat,)
    counts = microbatch_counts(config, batch_shards) if config.microbatches == "auto" else [config.microbatches]
    smallest: int | None = None
    for remat in remats:
        changes: dict[str, Any] = {"remat": remat} if config.remat == "auto" else {}
        fitting, needs = _mildest([{**changes, "microbatches": m} for m in counts], limit_bytes, make)
        if fitting is not None:
            chosen = [f"microbatches {fitting.config.microbatches}"] if config.microbatches == "auto" else []
            chosen += [f"remat {remat}"] if config.remat == "auto" else []
            limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
            fitting.notes.append(f"auto chose {', '.join(chosen)}: a step needs {format_bytes(needs)}{limit} a device")
            return fitting
        smallest = needs if smallest is None else min(smallest, needs)
    assert smallest is not None and limit_bytes is not None
    keys = [key for key in ("microbatches", "remat") if getattr(config, key) == "auto"]
    raise ConfigError(
        f"{' and '.join(keys)}: auto found no step that fits: the smallest of {len(remats)} x {len(counts)} choices needs "
        f"{format_bytes(smallest) if smallest < REFUSED else 'more'} a device, the limit is {format_bytes(limit_bytes)}. Use more devices, a larger mesh.fsdp or "
        "mesh.tensor, a smaller batch_size, or placement: {optimizer: host}."
    )


def _mildest(
    variants: Sequence[Mapping[str, Any]], limit: int | None, make: Callable[[Mapping[str, Any]], Program]
) -> tuple[Program | None, int]:
    """Returns (the first variant's program that fits, its bytes), or (None, bytes of the last); each needs less than the one before."""
    program, needs = _compiled(make(variants[0]))
    if limit is None or needs <= limit:
        return program, needs
    if len(variants) == 1:
        return None, needs
    best, needs = _compiled(make(variants[-1]))
    if best is None or needs > limit:
        return None, needs
    low, high = 0, len(variants) - 1
    while high - low > 1:
        middle = (low + high) // 2
        other, bytes_of_other = _compiled(make(variants[middle]))
        if other is not None and bytes_of_other <= limit:
            high, best, needs = middle, other, bytes_of_other
        else:
            low = middle
    return best, needs


def _compiled(program: Program) -> tuple[Program | None, int]:
    """Returns (the program, bytes of its step on one device); (None, a bound from below) where the compiler refuses its size."""
    try:
        stats = program.compiled.memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, REFUSED
    assert stats is not None, "this backend does not say what its programs need"
    new = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    temp = compiler.temp_bytes(stats, program.mesh.devices.flat[0].platform)
    return program, stats.argument_size_in_bytes + new + temp + stats.generated_code_size_in_bytes


def microbatch_counts(config: Config, batch_shards: int) -> list[int]:
    """Returns the microbatch counts, powers of two, that cut the batch evenly over so many shards."""
    rows = config.batch_size // batch_shards
    powers = (2**i for i in range(MOST_MICROBATCHES.bit_length()))
    return [m for m in powers if m <= MOST_MICROBATCHES and rows % m == 0] or [1]


# ---- limits -----------------------------------------------------------------------------------------------------------


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Returns the bytes of one device that a program may use: as the backend says, the machine's share (CPU), or the chip's."""
    first = devices[0]
    if first.platform == "cpu":
        local = sum(d.process_index == jax.process_index() for d in devices)
        return memory_of_this_machine() // max(1, local)
    mine = next((d for d in devices if hasattr(d, "memory_stats") and d.process_index == jax.process_index()), None)
    try:
        stats = mine.memory_stats() if mine is not None else None
    except jax.errors.JaxRuntimeError:  # a device that is only described
        stats = None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    chip = chip_of_device_kind(first.device_kind, first.platform)
    return None if chip is None else chip.limit_bytes


def memory_of_this_machine() -> int:
    """Returns the bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
