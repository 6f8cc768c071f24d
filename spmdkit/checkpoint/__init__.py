"""Checkpoints of a run: saved asynchronously, committed atomically, restored onto any mesh.

Input: a state of arrays and a JSON record. Output: `checkpoints/<step>/`, readable by orbax alone, or the state on
another mesh. record.json is written just before orbax renames the temporary directory: a step with it is complete.
"""

from spmdkit.checkpoint.checkpoints import Checkpoints
from spmdkit.checkpoint.export import export, read_state
from spmdkit.checkpoint.lease import Lease
from spmdkit.checkpoint.listing import best_step, choose_step, hold_step, inspect, ls, newest_step, verify
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.quarantine import DAMAGED_MARK
from spmdkit.checkpoint.record import ignored_entries
from spmdkit.checkpoint.retention import remove
from spmdkit.checkpoint.run_directory import checkpoints_of_run, prepare_run_dir, run_lock
from spmdkit.checkpoint.state_dict import leaf_table, nest
from spmdkit.checkpoint.weights import merged

__all__ = [
    "DAMAGED_MARK",
    "Checkpoints",
    "Lease",
    "Remote",
    "best_step",
    "checkpoints_of_run",
    "choose_step",
    "export",
    "hold_step",
    "ignored_entries",
    "inspect",
    "leaf_table",
    "ls",
    "merged",
    "nest",
    "newest_step",
    "prepare_run_dir",
    "read_state",
    "remove",
    "run_lock",
    "verify",
]
