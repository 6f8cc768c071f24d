"""`read_machine`: a machine that the user describes in YAML, as a target: `--target cluster.yaml`, or `cluster.yaml:4`
for four hosts or slices.

    chip: h100                # of the table of chips: the step is compiled for it, and its figures hold unless replaced
    hosts: 4                  # GPU
    devices_per_host: 8
    topology: 4x4x4           # TPU, in place of hosts
    slices: 2
    flops_per_s: {bfloat16: 756e12, float32: 378e12}     # of one device, as are all figures
    memory_bytes: 80e9
    memory_bytes_per_s: 2.0e12
    links: {inner: {bytes_per_s: 300e9, latency_s: 3e-6}, outer: {bytes_per_s: 25e9}, host: {bytes_per_s: 32e9}}
    efficiency: {matmul: 0.6}

Rates are peaks in one direction; `efficiency` is the share that a program reaches. inner: between devices of a host
(GPU) or one link of the torus (TPU); outer: between hosts or slices; host: to the host's memory.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from spmdkit.config import problems, source, wording
from spmdkit.config.fields import Section
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.mesh.chips import CHIPS, Chip

_TEXT = re.compile(r"(?P<file>.+\.ya?ml)(?::(?P<number>[1-9]\d{0,4}))?")
_Rate = Annotated[float, Field(gt=0, le=1e24)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Number = Annotated[int, Field(ge=1, le=100_000)]


class _Link(Section):
    bytes_per_s: _Rate | None = None
    """Peak in one direction."""
    latency_s: Annotated[float, Field(ge=0, le=10)] | None = None
    """Time of one hop."""


class _Links(Section):
    inner: _Link = _Link()
    """Between devices of a host, or one link of a torus."""
    outer: _Link = _Link()
    """Between hosts or slices; the share of one device."""
    host: _Link = _Link()
    """Between a device and its host's memory."""


class _Efficiency(Section):
    matmul: _Share | None = None
    """Share of the peak that matrix products reach."""
    memory: _Share | None = None
    """Share of the peak of memory."""
    link: _Share | None = None
    """Share of the peak of links."""
    kernel: _Share | None = None
    """Share of the peak that attention kernels reach."""


class _Machine(Section):
    chip: Annotated[str, Field(examples=["h100"])]
    """Chip of the table for which the step is compiled."""
    hosts: _Number | None = None
    """Number of hosts with GPUs."""
    devices_per_host: _Number | None = None
    """GPUs of a host."""
    topology: Annotated[str, Field(pattern=r"^\d+(x\d+)+$", examples=["4x4x4"])] | None = None
    """Shape of a TPU slice in chips."""
    slices: _Number | None = None
    """Number of TPU slices."""
    flops_per_s: dict[str, _Rate] = Field(default_factory=dict)
    """Dtype of a matrix product -> peak of one device."""
    memory_bytes: _Rate | None = None
    """Memory of one device."""
    memory_bytes_per_s: _Rate | None = None
    """Peak of the memory of one device."""
    reserved_bytes: Annotated[float, Field(ge=0, le=1e15)] | None = None
    """Memory of one device that is not available to a program."""
    links: _Links = _Links()
    """Links of the devices."""
    efficiency: _Efficiency = _Efficiency()
    """Shares of the peaks that a program reaches."""


def read_machine(text: str) -> tuple[Chip, str] | None:
    """Returns the chip of a target that is a YAML file, and its shape as in a target (`4x8`, `4x4x4*2`); None if the
    text names no such file.

    Raises:
        ConfigError: the file cannot be read, or does not describe a machine.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    name = match["file"]
    if not Path(name).is_file():
        raise ConfigError(
            f"target {text}: no such file {name}. It describes a machine. Try a file with the lines chip: h100, hosts: "
            "1, devices_per_host: 8."
        )
    document = source.read_file(Path(name).absolute(), name)
    origin = problems.Origin(Path(name), name, document.places)
    try:
        machine = _Machine.model_validate(document.value)
    except ValidationError as error:
        found = wording.translate(_Machine, error.errors(include_url=False))
        raise ConfigError(problems.render(found, origin)) from None
    if problem := _problem(machine):
        raise ConfigError(problems.render([problem], origin))
    chip = CHIPS[machine.chip]
    number = int(match["number"] or (machine.slices if chip.kind == "tpu" else machine.hosts) or 1)
    if chip.kind == "tpu":
        return _with_figures(chip, machine), f"{machine.topology}*{number}" if number > 1 else str(machine.topology)
    return _with_figures(chip, machine), f"{number}x{machine.devices_per_host or chip.devices_per_host}"


def _problem(machine: _Machine) -> problems.Problem | None:
    names = [name for name, chip in CHIPS.items() if chip.kind != "cpu"]
    if machine.chip not in names:
        hint = nearest(machine.chip, names) or f" Known: {', '.join(names)}."
        rule = "Name the chip for which the step is compiled; the other keys replace its figures."
        return problems.Problem(("chip",), f"is {machine.chip!r}, which the table does not hold.{hint} {rule}")
    kind = CHIPS[machine.chip].kind
    for key, of in (("hosts", "gpu"), ("devices_per_host", "gpu"), ("topology", "tpu"), ("slices", "tpu")):
        if getattr(machine, key) is not None and of != kind:
            repair = "topology: 4x4x4 and slices: 1" if kind == "tpu" else "hosts: 1 and devices_per_host: 8"
            return problems.Problem((key,), f"has no effect for the {kind.upper()} {machine.chip}. Try {repair}.")
    if kind == "tpu" and machine.topology is None:
        return problems.Problem(("topology",), "is missing: the shape of a slice in chips. Add topology: 4x4x4.")
    return None


def _with_figures(chip: Chip, machine: _Machine) -> Chip:
    """Returns the chip with the figures of a file in place of its own."""
    given = machine.links
    return replace(
        chip,
        flops_per_s={**chip.flops_per_s, **machine.flops_per_s},
        memory_bytes=int(machine.memory_bytes or chip.memory_bytes),
        memory_bytes_per_s=machine.memory_bytes_per_s or chip.memory_bytes_per_s,
        reserved_bytes=int(chip.reserved_bytes if machine.reserved_bytes is None else machine.reserved_bytes),
        efficiency=replace(chip.efficiency, **_set(machine.efficiency)),
        inner=replace(chip.inner, **_set(given.inner)),
        outer=replace(chip.outer, **_set(given.outer)),
        host_link=replace(chip.host_link, **_set(given.host)),
    )


def _set(section: Section) -> dict[str, Any]:
    return section.model_dump(exclude_none=True)
