"""Checkpoints of a run: saved while training goes on, whole or not at all, restored onto any mesh.

On disk, readable with orbax alone:

    checkpoints/40/record.json   what the checkpoint holds: leaves, files and their sizes, metrics, the caller's record
    checkpoints/40/state/        orbax's own format: a nested dict of arrays, one level per `/` of a leaf's path

A step is committed when orbax has renamed its temporary directory to the plain step number; the record is written just
before that, so what has a record is complete. Files of this folder, in the order data meets them:

    state_dict.py     a state as `{path: array}` and as the nested dict on disk; what differs between two states
    record.py         record.json; which steps a directory holds; whether the files are as they were written
    quarantine.py     the newest good step; damaged ones set aside
    listing.py        listing and inspecting, the newest and the best, holding one while it is read
    retention.py      keep the last k, every n-th and the best; deleting so that a kill leaves no half step
    orbax_backend.py  the one place that calls orbax
    restore.py        a step onto any mesh, every byte checked
    read_arrays.py     leaves of a step as numpy arrays
    integrity.py      every byte of a step read, without a model or a mesh
    save_errors.py    why a save is not started, or has failed
    checkpoints.py    Checkpoints: save, restore, wait
    export.py         plain parameters as safetensors or orbax
    run_directory.py  one run per directory, and a directory that can be written
    location.py       a local folder or one of a bucket: what differs
    object_store.py   a folder of a bucket (gs://, s3://), by fsspec
    staging.py        steps on their way to a bucket that orbax does not write to
    lease.py          one run per folder of a bucket
"""

from spmdkit.checkpoint.checkpoints import Checkpoints
from spmdkit.checkpoint.export import export
from spmdkit.checkpoint.integrity import verify
from spmdkit.checkpoint.lease import Lease
from spmdkit.checkpoint.listing import best_step, hold_step, inspect, ls, newest_step
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.quarantine import DAMAGED_MARK
from spmdkit.checkpoint.read_arrays import read_state
from spmdkit.checkpoint.record import ignored_entries
from spmdkit.checkpoint.retention import remove
from spmdkit.checkpoint.run_directory import RunLock, prepare_run_dir
from spmdkit.checkpoint.state_dict import leaf_table, nest

__all__ = [
    "DAMAGED_MARK",
    "Checkpoints",
    "Lease",
    "Remote",
    "RunLock",
    "best_step",
    "export",
    "hold_step",
    "ignored_entries",
    "inspect",
    "leaf_table",
    "ls",
    "nest",
    "newest_step",
    "prepare_run_dir",
    "read_state",
    "remove",
    "verify",
]
