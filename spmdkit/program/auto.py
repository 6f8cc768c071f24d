"""`microbatches: auto` and `remat: auto`: the mildest step whose compiled memory fits the device.

Nothing runs and nothing runs out of memory: each candidate is compiled, and the compiler says what it needs
(`memory.step_bytes`). Memory falls with the number of microbatches, so the smallest that fits is found by halving; less
is kept for the backward pass (remat: none, dots, full) only where no number of microbatches is enough, since that costs
arithmetic: about a third more at `full`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.program.memory import StepBytes

REMATS = ("none", "dots", "full")
"""Remat policies from the most memory to the least."""
MOST_MICROBATCHES = 64


def is_auto(config: Config) -> bool:
    """Returns whether a config leaves something to be chosen by memory."""
    return "auto" in (config.microbatches, config.remat)


class Trial(Protocol):
    """A program that is tried: what its step needs, and remarks for the user."""

    notes: list[str]

    @property
    def step_bytes(self) -> StepBytes: ...


T = TypeVar("T", bound=Trial)
Changes = Mapping[str, Any]
Say = Callable[[str], None]


def choices(config: Config, batch_shards: int) -> list[list[dict[str, Any]]]:
    """Returns what can be chosen, as changes of the config: a list for each remat, in each the most memory first.

    Args:
        batch_shards: parts into which the mesh cuts a batch.
    """
    remats = REMATS if config.remat == "auto" else (None,)
    counts = microbatch_counts(config, batch_shards) if config.microbatches == "auto" else [None]
    of = lambda **values: {key: value for key, value in values.items() if value is not None}
    return [[of(microbatches=m, remat=remat) for m in counts] for remat in remats]


def choose(among: Sequence[Sequence[Changes]], limit_bytes: int | None, make: Callable[[Changes], T], say: Say) -> T:
    """Returns the first choice that fits, compiled.

    Args:
        among: of `choices`.
        limit_bytes: of one device; None where nobody knows, and everything fits.
        make: the program of a choice.
        say: takes one line for each program that is tried.

    Raises:
        ConfigError: no choice fits; says what the smallest needs.
    """
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"

    def tried(changes: Changes) -> T:
        program = make(changes)
        verdict = "fits" if program.step_bytes.fits(limit_bytes) else "does not fit"
        say(f"auto: {_described(changes)}: a step needs {_needs(program.step_bytes)}{limit} a device, {verdict}")
        return program

    smallest: StepBytes | None = None
    for variants in among:
        chosen, program = _mildest(variants, limit_bytes, tried)
        if program.step_bytes.fits(limit_bytes):
            program.notes.append(
                f"auto chose {_described(chosen)}: a step needs {_needs(program.step_bytes)}{limit} a device"
            )
            return program
        smallest = min((x for x in (smallest, program.step_bytes) if x is not None), key=_order)
    assert smallest is not None
    raise ConfigError(
        f"{' and '.join(among[0][0])}: auto found no step that fits: the smallest of {len(among)} x {len(among[0])} choices needs "
        f"{_needs(smallest)} a device, the limit is {format_bytes(limit_bytes) if limit_bytes else 'what the compiler allows'}. Use more devices, a larger mesh.fsdp or "
        "mesh.tensor, a smaller batch_size, or offload: [optimizer]."
    )


def _mildest(variants: Sequence[Changes], limit: int | None, tried: Callable[[Changes], T]) -> tuple[Changes, T]:
    """Returns the first variant that fits with its program, or the last one; each needs less than the one before."""
    first = tried(variants[0])
    if first.step_bytes.fits(limit) or len(variants) == 1:
        return variants[0], first
    best = variants[-1], tried(variants[-1])
    if not best[1].step_bytes.fits(limit):
        return best
    low, high = 0, len(variants) - 1
    while high - low > 1:
        middle = (low + high) // 2
        program = tried(variants[middle])
        if program.step_bytes.fits(limit):
            high, best = middle, (variants[middle], program)
        else:
            low = middle
    return best


def _described(changes: Changes) -> str:
    return ", ".join(f"{key} {value}" for key, value in changes.items())


def _order(needed: StepBytes) -> tuple[bool, int]:
    return bool(needed.refused), needed.peak_bytes


def _needs(needed: StepBytes) -> str:
    """Returns the bytes in words: of a step that the compiler refuses at least those that it speaks of."""
    return f"{'more than ' if needed.refused else ''}{format_bytes(needed.peak_bytes)}"


def microbatch_counts(config: Config, batch_shards: int) -> list[int]:
    """Returns the microbatch counts, powers of two, that cut the batch evenly over so many shards."""
    rows = config.batch_size // batch_shards
    powers = (2**i for i in range(MOST_MICROBATCHES.bit_length()))
    return [m for m in powers if m <= MOST_MICROBATCHES and rows % m == 0] or [1]
