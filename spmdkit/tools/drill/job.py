"""The job of a drill: its request, and one run of it under the launcher."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdkit.config import Config
from spmdkit.elastic.sizes import Elastic
from spmdkit.foundation.formatting import visible
from spmdkit.launch import launch
from spmdkit.launch.membership import Elasticity
from spmdkit.tools.drill.driver import Driver

SPARE_RESTARTS = 3


@dataclasses.dataclass(frozen=True)
class DrillRequest:
    """The arguments of `spmdkit drill CONFIG ...`."""

    config: Path
    overrides: Sequence[str]
    faults: Sequence[str]
    num_processes: int = 2
    devices_per_process: int | None = None
    seed: int = 0
    count: int = 1
    as_json: bool = False


def run_job(
    request: DrillRequest, config: Config, folder: Path, driver: Driver, max_restarts: int, grace_s: float = 15.0
) -> int:
    """Returns the exit code of the job under the launcher; with in-process elasticity lost processes are replaced."""
    num, devices = request.num_processes, request.devices_per_process
    train, elasticity = ["train", str(request.config), *request.overrides, f"run_dir={folder}"], None
    if config.elastic.in_process:
        sizes = Elastic(train, f"{num}:{num}", num, devices)
        devices, elasticity = sizes.devices_per_process, Elasticity(sizes.resize, sizes.requested, sizes.standby)
    command = [sys.executable, "-m", "spmdkit", *train]
    try:
        return launch(
            command,
            num,
            devices,
            grace_s=grace_s,
            max_restarts=max_restarts,
            observer=driver,
            elasticity=elasticity,
        )
    finally:
        driver.close()


def report(line: str) -> None:
    print(visible(f"drill: {line}"), file=sys.stderr, flush=True)
