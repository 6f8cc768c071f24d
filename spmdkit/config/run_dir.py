"""Rules for `run_dir`. A run writes many files and must not write them to unexpected locations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from spmdkit.config.problems import Problem, show
from spmdkit.config.settings import Settings

PROJECT_FILES = (".git", "pyproject.toml", "setup.py")


def problems(config: Settings, folder: Path) -> Iterator[Problem]:
    """Yields the problems of `run_dir`. `folder` is the base of relative paths."""
    requested = config.run_dir
    text = ""
    if requested is None:
        return
    start, cwd = os.path.abspath(folder), os.getcwd()
    place = os.path.normpath(os.path.join(start, requested))
    roots = {_project(Path(start)), cwd if _inside(start, cwd) else start}
    if "://" in requested:
        bucket = f" with checkpoint.directory: {requested}" if requested.startswith(("gs://", "s3://")) else ""
        text = (
            "is a URL, and run_dir is a folder of this machine, for logs, metrics and the lock. Checkpoints alone lie "
            f"in a bucket. Try run_dir: runs/first{bucket}."
        )
    elif os.path.isabs(requested):
        if ".." in Path(requested).parts or Path(requested) == Path("/"):
            what = "goes up by '..'" if ".." in Path(requested).parts else "is the root of the file system"
            text = f"{what}. A run has its own folder, which it fills. Try run_dir: runs/first."
    elif not any(_inside(place, root) for root in roots):
        text = (
            f"leads out of the project, to {place}. A relative path stays in {max(roots, key=len)}. Try run_dir: "
            "runs/first, or give the whole path."
        )
    if text:
        yield Problem(("run_dir",), f"{show(requested)} {text}")


def _project(folder: Path) -> str:
    """Returns the nearest root folder of a project that contains `folder`, or `folder` if there is none."""
    for parent in (folder, *folder.parents):
        if parent != parent.parent and any((parent / name).exists() for name in PROJECT_FILES):
            return str(parent)
    return str(folder)


def _inside(path: str, root: str) -> bool:
    return root != os.sep and (path == root or path.startswith(root + os.sep))
