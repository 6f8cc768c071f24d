"""Checkpoints of a run: saved asynchronously, committed whole or not at all, restored onto any mesh.

Enters: a state of arrays and a JSON record. Leaves: `checkpoints/<step>/`, which orbax alone can read, or the state on
another mesh. record.json is written just before orbax renames the temporary directory: such a step is complete.
"""

from spmdkit.checkpoint.checkpoints import Checkpoints
from spmdkit.checkpoint.export import export, read_state
from spmdkit.checkpoint.lease import Lease
from spmdkit.checkpoint.listing import best_step, hold_step, inspect, ls, newest_step, verify
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.quarantine import DAMAGED_MARK
from spmdkit.checkpoint.record import ignored_entries
from spmdkit.checkpoint.retention import remove
from spmdkit.checkpoint.run_directory import prepare_run_dir, run_lock
from spmdkit.checkpoint.state_dict import leaf_table, nest

__all__ = [
    "DAMAGED_MARK",
    "Checkpoints",
    "Lease",
    "Remote",
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
    "run_lock",
    "verify",
]
