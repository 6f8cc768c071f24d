"""The sizes of an elastic job, in processes and microbatches. Each step has the same examples in the same order.

The global batch size is constant. A step on fewer devices uses more microbatches, so that the rows per device and
microbatch never exceed those of the first start:

    shards = product of the batch axes;  rows per microbatch = batch_size / (shards * microbatches)

A number of processes that does not divide the mesh or the batch is replaced by the next smaller one. A different number
changes the order of summation (1e-5). The same number gives bitwise equal results. Source: Horovod Elastic and
torchelastic's MIN:MAX, in which the user handles the global batch size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spmdkit.config import Config, load_config
from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import BATCH_AXES, fake_devices
from spmdkit.foundation.files import read_regular

ALLOWED = "processes"
"""File in the run directory with the number of processes allowed for the next start."""


class Size(NamedTuple):
    """One start."""

    processes: int
    microbatches: int

    def launch_arguments(self) -> tuple[int, list[str]]:
        """Returns the number of processes and the additional arguments of their command, for the launcher."""
        return self.processes, [f"microbatches={self.microbatches}"]


class Elastic:
    """The allowed sizes of a job.

    Args:
        command: of each process: `train CONFIG key=value ...`.
        between: `MIN:MAX`.
        num: processes of the first start.
        devices_per_process: None: the share of one of `num` processes in `devices: cpu:N`, otherwise 1.

    Attributes:
        devices_per_process: the same for all sizes.
        requested: with in-process elasticity, current processes -> `resize` for the number in the file `processes`;
        None
            unless that is larger.
        standby: number of standby processes.

    Raises:
        ConfigError: see the messages.
    """

    def __init__(self, command: Sequence[str], between: str, num: int, devices_per_process: int | None = None):
        self._least, self._most = _range(between, num)
        if len(command) < 2 or command[0] != "train":
            raise ConfigError(
                f"launch --elastic {between}: its command is train, found {' '.join(command[:1]) or 'none'}. Try -- "
                "train CONFIG."
            )
        config = load_config(Path(command[1]), list(command[2:]))
        if not isinstance(config.microbatches, int):
            raise ConfigError(
                f"{config.where('microbatches')}: is {config.microbatches}; launch --elastic counts them itself for "
                "each size. Give a number, as 1."
            )
        self._batch, self._mesh = math.gcd(*(size for _, size in config.batch_sizes)), config.mesh.sizes()
        self._run_dir = config.resolved_run_dir()
        self.requested = self._requested if config.elastic.in_process else None
        self.standby, self._ahead = config.elastic.standby, config.elastic.precompile
        self.devices_per_process = devices_per_process or _devices(config, num)
        if -1 not in self._mesh.values() and self._least < self._most:
            first = next(iter(self._mesh), "data")
            raise ConfigError(
                f"{config.where('mesh')}: launch --elastic {between} changes the number of devices, and all axes are "
                f"fixed ({self._mesh}). One axis takes what there is. Write {first}: -1."
            )
        shards, microbatches = self._shards(num), config.microbatches
        if shards is None or self._batch % (shards * microbatches):
            raise ConfigError(
                f"launch -n {num} --elastic {between}: {num * self.devices_per_process} devices do not fit mesh "
                f"{self._mesh} and batch_size {self._batch}. Both have to be divided evenly at the start. Choose "
                "another -n, or batch_size."
            )
        self._rows = self._batch // (shards * microbatches)
        self.first = Size(num, microbatches)

    def sizes_to_precompile(self) -> dict[int, list[str]]:
        """Returns the numbers of processes to compile for -> additional arguments of the command. Raises ConfigError
        for a number that is never used."""
        arguments = {}
        for processes in self._ahead:
            microbatches = self._fitting(processes)
            if microbatches is None or not self._least <= processes <= self._most:
                raise ConfigError(
                    f"elastic.precompile: {processes} processes are none that launch --elastic "
                    f"{self._least}:{self._most} would start again: mesh {self._mesh} and batch_size {self._batch} "
                    "have to be divided evenly. Remove it, or choose another number."
                )
            arguments[processes] = Size(processes, microbatches).launch_arguments()[1]
        return arguments

    def next_size(self, before: int, lost: int) -> Size | None:
        """Returns the size of the next start; None if no allowed number fits.

        Args:
            before: processes of the previous start.
            lost: the number of them that died by themselves, as if their machine was lost.
        """
        requested = self._allowed()
        most = min(self._most, max(before - lost, self._least) if requested is None else requested)
        for processes in range(most, self._least - 1, -1):
            if (microbatches := self._fitting(processes)) is not None:
                return Size(processes, microbatches)
        return None

    def resize(self, before: int, lost: int) -> tuple[int, list[str]] | None:
        """Returns the result of `after` for the launcher: the number, and additional arguments of the command."""
        size = self.next_size(before, lost)
        return None if size is None else size.launch_arguments()

    def _requested(self, now: int) -> tuple[int, list[str]] | None:
        size = self.next_size(now, 0) if (self._allowed() or 0) > now else None
        return None if size is None or size.processes <= now else size.launch_arguments()

    def _allowed(self) -> int | None:
        """Returns the number in the file `processes` of the run directory; None if it has none between MIN and MAX."""
        try:
            number = int(read_regular(self._run_dir / ALLOWED, 64))
        except (OSError, ValueError):
            return None
        return number if self._least <= number <= self._most else None

    def _shards(self, processes: int) -> int | None:
        """Returns the number of batch shards; None if the mesh does not fit."""
        devices = processes * self.devices_per_process
        fixed = math.prod(size for size in self._mesh.values() if size != -1)
        if devices % fixed or (-1 not in self._mesh.values() and devices != fixed):
            return None
        sizes = {axis: devices // fixed if size == -1 else size for axis, size in self._mesh.items()}
        return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)

    def _fitting(self, processes: int) -> int | None:
        """Returns the fewest microbatches for which no device gets more rows than at the first start."""
        shards = self._shards(processes)
        if shards is None or self._batch % shards:
            return None
        rows = self._batch // shards
        return next(m for m in range(1, rows + 1) if rows % m == 0 and rows // m <= self._rows)


def _range(between: str, num: int) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", between)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(
            f"--elastic {between[:40]}: two numbers of processes, the fewest and the most, from 1 on. Try --elastic "
            f"1:{max(num, 1)}."
        )
    least, most = int(match[1]), int(match[2])
    if not least <= num <= most:
        raise ConfigError(
            f"launch -n {num} --elastic {between}: the first start has a number between the two. Try -n {most}."
        )
    return least, most


def _devices(config: Config, num: int) -> int:
    total = fake_devices(config.devices) if isinstance(config.devices, str) else None
    if total is None:
        return len(config.devices) if isinstance(config.devices, list) else 1
    if total % num:
        raise ConfigError(
            f"{config.where('devices')}: cpu:{total} over {num} processes leaves {total % num} over. Try devices: "
            f"cpu:{num}."
        )
    return total // num
