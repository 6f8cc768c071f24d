"""Restores a step: compares the requested state with the saved one and the files with the record, and verifies the
checksum of each chunk during the read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from spmdkit.checkpoint import record as records
from spmdkit.checkpoint import state_dict
from spmdkit.checkpoint.location import Location
from spmdkit.errors import CheckpointError
from spmdkit.foundation.exhausted_memory import is_exhausted
from spmdkit.foundation.trees import named_leaves

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

MAX_DIFFERENCES = 5


def restore(
    checkpointer: ocp.AsyncCheckpointer,
    directory: Location,
    step: int,
    abstract_state: Any,
    optional: str | tuple[str, ...],
) -> tuple[Any, dict[str, Any]]:
    """Returns (state, the user record) of a step; see `Checkpoints.restore`."""
    saved = records.read_record(directory, step)
    table = state_dict.leaf_table(abstract_state)
    unread = [path for path in saved.leaves if path.startswith(optional) and path not in table]
    _check_fits(directory, saved, table, unread)
    records.check_files(directory, saved)
    requested = [(path, _with_sharding(leaf)) for path, leaf in named_leaves(abstract_state)]
    from spmdkit.checkpoint import orbax_backend

    tree = state_dict.nest({path: leaf for path, leaf in requested if leaf.size})
    try:
        loaded = orbax_backend.load(checkpointer, directory / str(step), tree, partial=bool(unread))
    except Exception as error:
        if is_exhausted(error):
            raise
        raise records.damaged_error(directory, step, records.first_line(records.root_cause(error))) from error
    arrays = [state_dict.pick(loaded, path) if leaf.size else _empty(leaf) for path, leaf in requested]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), arrays), saved.user


def _check_fits(
    directory: Location, found: records.Record, requested: state_dict.LeafTable, unread: Sequence[str]
) -> None:
    saved = {path: leaf for path, leaf in found.leaves.items() if path not in unread}
    lines = state_dict.differences(saved, requested)
    if not lines:
        return
    shown = "".join(f"\n  {line}" for line in lines[:MAX_DIFFERENCES])
    more = f"\n  and {len(lines) - MAX_DIFFERENCES} more" if len(lines) > MAX_DIFFERENCES else ""
    of_optimizer = all(line.startswith("opt_state/") for line in lines)
    raise CheckpointError(
        f"restoring {directory / str(found.step)} into this task's state: {len(lines)} "
        f"{'leaf differs' if len(lines) == 1 else 'leaves differ'} (saved {len(found.leaves)}, requested "
        f"{len(requested)}).{shown}{more}\nA checkpoint fits only the model, optimizer and precision that it was "
        "saved with; the mesh and the layout may change. "
        + (
            "To continue with another optimizer or other frozen parameters: train --reset opt_state. "
            if of_optimizer
            else "To continue with other parameters: train --reset 'PATTERN' of their paths. "
        )
        + "Or use the config that wrote it (it is in the checkpoint's record), or set run_dir to a new folder to start "
        "again from step 0."
    )


def _with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if leaf.sharding is not None:
        return leaf
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the array without elements that `leaf` describes."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        keys: jax.Array = jax.device_put(jax.random.split(jax.random.key(0), leaf.shape), leaf.sharding)
        return keys
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: np.zeros(leaf.shape, leaf.dtype)[index]
    )
