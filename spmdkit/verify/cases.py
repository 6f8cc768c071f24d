"""The cases of `verify`: the config's mesh or all meshes of a number of devices, the numbers of microbatches, and the
exact reducer."""

from __future__ import annotations

import itertools
import math
from typing import Any

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.foundation.constants import fake_devices
from spmdkit.foundation.formatting import shown
from spmdkit.mesh.mesh import AXES, resolve
from spmdkit.program.step_context import reducer_of

ROWS = 2
"""Rows per device and microbatch. XLA's convolutions need two with replica and model axes (docs/why/limits.md)."""

DEFAULT_DEVICES = 8


def all_meshes(num_devices: int, max_axis: int) -> list[dict[str, int]]:
    """Returns every mesh of `num_devices` with axes of at most `max_axis`, as axis sizes above one; fewest axes
    first."""
    divisors = [n for n in range(1, min(num_devices, max_axis) + 1) if num_devices % n == 0]
    meshes = (sizes for sizes in itertools.product(divisors, repeat=len(AXES)) if math.prod(sizes) == num_devices)
    return sorted(({a: n for a, n in zip(AXES, sizes, strict=True) if n > 1} for sizes in meshes), key=len)


def choose_devices(config: Config, requested: int | None) -> int:
    """Returns the number of fake devices: `requested`, the config's number, or 8."""
    if requested is not None:
        if requested < 1:
            raise ConfigError(
                f"--devices is {requested}. The number of fake devices must be at least 1. Try --devices 8."
            )
        return requested
    if isinstance(config.devices, str) and (count := fake_devices(config.devices)):
        return count
    sizes = config.mesh.sizes().values()
    return math.prod(sizes) if sizes and -1 not in sizes else DEFAULT_DEVICES


def config_mesh(config: Config, num_devices: int) -> dict[str, int]:
    """Returns the config's mesh as axis sizes above one."""
    return {axis: size for axis, size in resolve(config.mesh.sizes(), num_devices).items() if size > 1}


def parse_microbatches(text: str | None, config: Config) -> list[int]:
    """Returns the numbers in `1,2,4`. The default is 1 and the config's number, or 1 and 2 if that is `auto`."""
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
    name = " x ".join(f"{shown(axis)} {size}" for axis, size in mesh.items()) or "one device"
    return name if microbatches == 1 else f"{name} / {microbatches}"


def exact_reducer(config: Config) -> str | dict[str, Any]:
    """Returns the reducer setting with which a run can equal one device: an inexact reducer gets its exact options.

    It has no warm-up, since during warm-up the reducer acts as `sum`.
    """
    reducer = reducer_of(config)
    choice, _ = plugins.split_common_options("reducers", config.reducer)
    name, options = plugins.split(choice)
    no_warmup = {"warmup": 0} if plugins.is_reference(choice) and reducer.warmup else {}
    if reducer.exact:
        return {name: options | no_warmup} if no_warmup else choice
    return "sum" if reducer.exact_options is None else {name: options | no_warmup | dict(reducer.exact_options)}


def reducer_note(config: Config) -> str | None:
    """Returns the note on a reducer that is not compared with its configured options, or None."""
    configured, compared = plugins.split_common_options("reducers", config.reducer)[0], exact_reducer(config)
    if plugins.split_common_options("reducers", compared)[0] == configured:
        return None
    name = plugins.split(configured)[0]
    if reducer_of(config).exact_options is not None:
        return f"reducer {name} is not exact. verify compares {compared}, which is. Tests of {name} bound its rounding"
    return (
        f"reducer {name} is not exact and declares no exact options. verify compares {compared} and does not check "
        f"{name}"
    )
