"""Which cases there are: every mesh of a number of devices, or the config's own; the batch size that fits all of
them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.foundation.constants import fake_devices
from spmdkit.mesh.mesh import AXES, resolve
from spmdkit.program.step_context import reducer_of

ROWS = 2
"""Rows on each device and microbatch. One is not enough for convolutions on meshes with replica and model axes
(docs/guide.md)."""

DEFAULT_DEVICES = 8


def all_meshes(num_devices: int, max_axis: int) -> list[dict[str, int]]:
    """Returns every mesh of `num_devices` whose axes are at most `max_axis`, as the sizes larger than one; few axes
    first."""

    def sizes(rest: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if not axes:
            if rest == 1:
                yield {}
            return
        for size in range(1, min(rest, max_axis) + 1):
            if rest % size == 0:
                for others in sizes(rest // size, axes[1:]):
                    yield ({axes[0]: size} if size > 1 else {}) | others

    return sorted(sizes(num_devices, AXES), key=len)


def choose_devices(config: Config, asked: int | None) -> int:
    """Returns the number of fake devices: as asked, or as the config says, or 8.

    Raises:
        ConfigError: less than one.
    """
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"--devices is {asked}. It is a number of fake devices of at least 1. Try --devices 8.")
        return asked
    if isinstance(config.devices, str) and (count := fake_devices(config.devices)):
        return count
    sizes = config.mesh.sizes().values()
    return math.prod(sizes) if sizes and -1 not in sizes else DEFAULT_DEVICES


def config_mesh(config: Config, num_devices: int) -> dict[str, int]:
    """Returns the config's own mesh as the sizes larger than one.

    Raises:
        ConfigError: it does not fit the number of devices.
    """
    return {axis: size for axis, size in resolve(config.mesh.sizes(), num_devices).items() if size > 1}


def choose_batch_size(config: Config, given: bool, num_devices: int, microbatches: Sequence[int]) -> int:
    """Returns the config's batch size where it was `given` by an override, otherwise a small one that every mesh can
    cut."""
    if given:
        return config.batch_size
    return ROWS * num_devices * math.lcm(*microbatches)


def parse_microbatches(text: str | None, config: Config) -> list[int]:
    """Returns the numbers of `1,2,4`; without them 1 and the config's own, or 2 where that is `auto`.

    Raises:
        ConfigError: not a list of numbers of at least 1.
    """
    if text is None:
        return sorted({1, config.microbatches if isinstance(config.microbatches, int) else 2})
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--microbatches is {text!r}. It is a list of numbers of at least 1. Try --microbatches 1,2,4."
        )
    return sorted({int(part) for part in parts})


def describe_case(mesh: dict[str, int], microbatches: int) -> str:
    """Returns `data 4 x fsdp 2`, with ` / 2` for two microbatches."""
    name = " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device"
    return name if microbatches == 1 else f"{name} / {microbatches}"


def exact_reducer(config: Config) -> str | dict[str, Any]:
    """Returns the choice of a reducer under which a run can equal one device: an inexact one at the options at which it
    loses nothing.

    Without its warm-up: what is compared would be `sum`.
    """
    made = reducer_of(config)
    choice, _ = plugins.without_common("reducers", config.reducer)
    name, options = plugins.split(choice)
    cold = {"warmup": 0} if plugins.is_own(choice) and made.warmup else {}
    if made.exact:
        return {name: options | cold} if cold else choice
    return "sum" if made.exact_options is None else {name: options | cold | dict(made.exact_options)}


def reducer_note(config: Config) -> str | None:
    """Returns what a report says of a reducer that is not compared as it is; None where it is, at its own options."""
    asked, proven = plugins.without_common("reducers", config.reducer)[0], exact_reducer(config)
    if plugins.without_common("reducers", proven)[0] == asked:
        return None
    made, name = reducer_of(config), plugins.split(asked)[0]
    if made.exact_options is not None:
        return f"reducer {name} is not exact: what is compared is {proven}, at which it loses nothing; its rounding is bounded by its own tests"
    if made.input_scale == "mean":
        why = "makes of the means of the replicas something that is not their mean"
    else:
        why = "is not exact, and names no options at which it loses nothing"
    return f"reducer {name} {why}: what is compared is {proven}, and of {name} nothing is proven here"
