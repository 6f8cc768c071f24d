"""A run with checkpoints in a bucket: this attempt leases the folder, and a new disk downloads the metrics.

Each host has a private run directory. The directory of process 0 contains the records, the others only events and logs.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spmdkit.checkpoint import Lease, Remote, location, ownership
from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.foundation import files
from spmdkit.foundation.formatting import visible
from spmdkit.program.restore import checkpoints_of
from spmdkit.run.recovery import skipped_batches
from spmdkit.run.recovery.restore import RECORDS, last_step

STAGE = "staging"
"""Folder in the run directory for checkpoints that are being uploaded."""


def lease_bucket(config: Config, cluster: Cluster, local: ownership.Fence, stack: ExitStack) -> Callable[[], bool]:
    """Leases the bucket's folder until `stack` is closed. Returns the check that this run still owns the folders that
    it writes to.

    Raises:
        ConfigError: on every process, if another run owns the folder.
        Unreachable: on every process, if the bucket cannot be used.
    """
    directory = checkpoints_of(config)
    if not isinstance(directory, Remote):
        return local.is_owner
    print_line = lambda line: (
        None if config.log.progress == "off" else print(visible(line), file=sys.stderr, flush=True)
    )
    lease = Lease(directory, local.attempt, print_line=print_line)

    def acquire() -> dict[str, str]:
        if cluster.is_main:
            stack.enter_context(lease)
        return {}

    if cluster.num_processes == 1:
        acquire()
    else:
        cluster.same_everywhere("the checkpoints' folder", acquire)
    return lambda: local.is_owner() and (not cluster.is_main or lease.is_owner())


def download_records(config: Config, run_dir: Path) -> list[str]:
    """Downloads the records that were copied with the checkpoints, if they have more steps than the local ones; returns
    lines for the user.

    Existing files are renamed. Called on process 0, before any record is written.
    """
    directory, lines = checkpoints_of(config), []
    if not isinstance(directory, Remote):
        return []
    for name in RECORDS:
        path = run_dir / name
        fetched = run_dir / f".{name}.fetched"
        with contextlib.suppress(FileNotFoundError):
            (directory / location.RUN_FOLDER / name).download(fetched)
            if last_step(fetched) > last_step(path):
                if path.exists():
                    path.rename(path.with_suffix(f".before-{last_step(path)}.jsonl"))
                fetched.rename(path)
                lines.append(f"note: {name} up to step {last_step(path)} was fetched from {directory}")
        fetched.unlink(missing_ok=True)
    return lines


def download_skipped(config: Config, cluster: Cluster, run_dir: Path) -> None:
    """Downloads the list of skipped batches on process 0, if its disk has none."""
    directory, path = checkpoints_of(config), run_dir / skipped_batches.NAME
    if isinstance(directory, Remote) and cluster.is_main and not path.exists():
        with contextlib.suppress(FileNotFoundError):
            files.replace(path, (directory / location.RUN_FOLDER / skipped_batches.NAME).read_bytes())


def upload_skipped(config: Config, cluster: Cluster, run_dir: Path) -> None:
    """Uploads the list of skipped batches on process 0 as soon as it is written, before the next save."""
    directory = checkpoints_of(config)
    if isinstance(directory, Remote) and cluster.is_main:
        (directory / location.RUN_FOLDER / skipped_batches.NAME).write_bytes(
            (run_dir / skipped_batches.NAME).read_bytes()
        )


def options(run_dir: Path, cluster: Cluster) -> dict[str, Any]:
    """Returns the arguments of `Checkpoints` for a bucket. Processes on one host share run_dir but have separate
    staging folders. Staging folders of an earlier start with more processes are deleted."""
    for stage in (run_dir / STAGE).glob("p*"):
        if stage.name[1:].isdecimal() and int(stage.name[1:]) >= cluster.num_processes:
            shutil.rmtree(stage, ignore_errors=True)
    return {
        "stage": run_dir / STAGE / f"p{cluster.process_index:03d}",
        "run_files": [run_dir / name for name in RECORDS],
    }
