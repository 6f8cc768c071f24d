"""`microbatches: auto` and `remat: auto`: selects the cheapest step that fits the device by its compiled memory.

No step runs. Each candidate is compiled, and the compiler reports its memory (`memory.step_bytes`). Memory decreases
with the number of microbatches, so bisection finds the smallest number that fits. A stronger remat policy (none, dots,
full) is used only if no number of microbatches fits, since it adds computation: about a third at `full`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.program.memory import StepBytes

REMATS = ("none", "dots", "full")
"""Remat policies, by decreasing memory."""
MAX_MICROBATCHES = 64


def is_auto(config: Config) -> bool:
    """Returns whether a config has a setting to select by memory."""
    return "auto" in (config.microbatches, config.remat)


Changes = Mapping[str, Any]
Say = Callable[[str], None]


def choices(config: Config, batch_shards: int) -> list[list[dict[str, Any]]]:
    """Returns the candidates as config changes: one list per remat policy, by decreasing memory."""
    remats = REMATS if config.remat == "auto" else (None,)
    counts = microbatch_counts(config, batch_shards) if config.microbatches == "auto" else [None]
    of: Callable[..., dict[str, Any]] = lambda **values: {
        key: value for key, value in values.items() if value is not None
    }
    return [[of(microbatches=m, remat=remat) for m in counts] for remat in remats]


def choose(
    among: Sequence[Sequence[Changes]], limit_bytes: int | None, make: Callable[[Changes], Any], print_line: Say
) -> Any:
    """Returns the program of the first candidate that fits, compiled. Raises ConfigError if no candidate fits.

    Args:
        among: candidates from `choices`.
        limit_bytes: memory limit of one device; None if unknown: every candidate fits.
        make: returns the program of a candidate.
        print_line: receives one line per candidate.
    """
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"

    def tried(changes: Changes) -> Any:
        program = make(changes)
        verdict = "fits" if program.step_bytes.fits(limit_bytes) else "does not fit"
        print_line(
            f"auto: {_described(changes)}: a step needs {_format_needed(program.step_bytes)}{limit} per device, "
            f"{verdict}"
        )
        return program

    needed = list[StepBytes]()
    for variants in among:
        chosen, program = _first_that_fits(variants, limit_bytes, tried)
        needed.append(program.step_bytes)
        if needed[-1].fits(limit_bytes):
            needs = f"a step needs {_format_needed(needed[-1])}{limit} per device"
            program.notes.append(f"auto chose {_described(chosen)}: {needs}")
            return program
    smallest = min(needed, key=lambda x: (bool(x.refused), x.peak_bytes))
    raise ConfigError(
        f"{' and '.join(among[0][0])}: auto found no step that fits: the smallest of {len(among)} x {len(among[0])} "
        f"choices needs {_format_needed(smallest)} per device, the limit is "
        f"{format_bytes(limit_bytes) if limit_bytes else 'what the compiler allows'}. Use more devices, a larger "
        "mesh.fsdp or mesh.tensor, a smaller batch_size, or offload: [optimizer]."
    )


def _first_that_fits(
    variants: Sequence[Changes], limit: int | None, tried: Callable[[Changes], Any]
) -> tuple[Changes, Any]:
    """Returns the first variant that fits, or the last variant, with its program. Memory decreases along `variants`."""
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


def _format_needed(needed: StepBytes) -> str:
    """Returns the bytes as text; for a step that the compiler rejects, the lower bound that it reports."""
    return f"{'more than ' if needed.refused else ''}{format_bytes(needed.peak_bytes)}"


def microbatch_counts(config: Config, batch_shards: int) -> list[int]:
    """Returns the microbatch counts, powers of two, that divide the rows of each of the `batch_shards` evenly."""
    rows = config.largest_batch // batch_shards
    powers = (2**i for i in range(MAX_MICROBATCHES.bit_length()))
    return [m for m in powers if m <= MAX_MICROBATCHES and rows % m == 0] or [1]
