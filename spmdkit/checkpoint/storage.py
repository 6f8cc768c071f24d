"""The one place that calls orbax: an asynchronous checkpointer of one nested dict of arrays per step.

AsyncCheckpointer and not CheckpointManager: which steps exist is read from the disk at each question (the manager
caches it, and counts steps that never committed), what is kept is decided after the commit, and a failed save is ours
to report.
A folder written here opens with `ocp.CheckpointManager` and `ocp.StandardCheckpointer` all the same.

`active_processes` is always given with several processes: orbax then meets at barriers of the coordination service,
which time out, and not in a psum over all devices, which waits for ever and can cross the step's own collectives.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_utils import construct_restore_args

from spmdkit.checkpoint.record import STATE_FOLDER


def open_checkpointer(num_processes: int, timeout_s: float, before_commit: Callable[[], None]) -> ocp.AsyncCheckpointer:
    """Returns a checkpointer; `before_commit` runs in the background on process 0, when all files are written."""
    logging.getLogger("absl").addFilter(_drop_orbax_tracebacks)
    if getattr(sys.unraisablehook, "func", None) is not _quiet_after_failure:
        sys.unraisablehook = functools.partial(_quiet_after_failure, sys.unraisablehook)
    processes = set(range(num_processes)) if num_processes > 1 else None
    options = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=processes, barrier_sync_key_prefix="spmdkit"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        **{STATE_FOLDER: ocp.PyTreeCheckpointHandler(multiprocessing_options=options)},
    )
    return ocp.AsyncCheckpointer(
        handler,
        async_options=ocp.AsyncOptions(timeout_secs=max(1, round(timeout_s)), post_finalization_callback=before_commit),
        multiprocessing_options=options,
    )


def _drop_orbax_tracebacks(record: logging.LogRecord) -> bool:
    """Keeps orbax from printing the traceback of a failed save: we raise it, with its cause, in the caller's thread."""
    return not (record.exc_info and "orbax" in record.pathname)


def _quiet_after_failure(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Keeps tensorstore from printing one traceback for each array that it still wrote when a failed save had ended.

    orbax closes its event loop at the first failed write, and the others report to it from tensorstore's own threads
    (orbax 0.12.8). The failure itself is raised to us.
    """
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        before(unraisable)


def start_save(checkpointer: ocp.AsyncCheckpointer, folder: Path, tree: dict[str, Any]) -> None:
    """Copies the arrays to the host and returns; they are written and committed in the background."""
    checkpointer.save(str(folder), args=ocp.args.Composite(**{STATE_FOLDER: ocp.args.PyTreeSave(tree)}))


def load(
    checkpointer: ocp.AsyncCheckpointer, folder: Path, tree: dict[str, Any], partial: bool = False
) -> dict[str, Any]:
    """Returns the arrays of a step. `tree`: jax.ShapeDtypeStruct with shardings, the structure of the whole step (`partial`: of a part)."""
    args = ocp.args.PyTreeRestore(item=tree, restore_args=construct_restore_args(tree), partial_restore=partial)
    restored = checkpointer.restore(str(folder), args=ocp.args.Composite(**{STATE_FOLDER: args}))
    loaded: dict[str, Any] = restored[STATE_FOLDER]
    return loaded


def load_numpy(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of a step, given as abstract arrays, as numpy arrays: no model, no mesh."""
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype), tree),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        loaded: dict[str, Any] = checkpointer.restore(str(folder / STATE_FOLDER), args=args)
    return loaded


def write_plain(folder: Path, tree: dict[str, Any]) -> None:
    """Writes a nested dict of numpy arrays as an orbax checkpoint of its own, and waits for it."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(str(folder), tree)
        checkpointer.wait_until_finished()
