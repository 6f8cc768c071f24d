"""Checkpoints of a run: saved while training goes on, whole or not at all, restored onto any mesh.

On disk, readable with orbax alone:

    checkpoints/40/record.json   what the checkpoint holds: leaves, files and their sizes, metrics, the caller's record
    checkpoints/40/state/        orbax's own format: a nested dict of arrays, one level per `/` of a leaf's path

A step is committed when orbax has renamed its temporary directory to the plain step number; the record is written just
before that, so what has a record is complete. Files of this folder, in the order data meets them:

    leaves.py         a state as `{path: array}` and as the nested dict on disk; what differs between two states
    record.py         record.json; which steps a directory holds; listing and inspecting them
    retention.py      keep the last k and the best; deleting so that a kill leaves no half step
    storage.py        the one place that calls orbax
    checkpoints.py    Checkpoints: save, restore, wait
    export.py         plain parameters as safetensors or orbax
    run_directory.py  one run per directory, and a directory that can be written
"""

from spmdkit.checkpoint.checkpoints import Checkpoints
from spmdkit.checkpoint.export import export
from spmdkit.checkpoint.leaves import leaf_table, nest
from spmdkit.checkpoint.record import ignored_entries, inspect, ls
from spmdkit.checkpoint.run_directory import RunLock, prepare_run_dir

__all__ = [
    "Checkpoints",
    "RunLock",
    "export",
    "ignored_entries",
    "inspect",
    "leaf_table",
    "ls",
    "nest",
    "prepare_run_dir",
]
