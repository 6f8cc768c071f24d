"""The only file that calls orbax: an asynchronous checkpointer of one nested dict of arrays per step.

AsyncCheckpointer and not CheckpointManager: the manager caches which steps exist and counts steps that were never
committed; retention runs after the commit; and spmdkit itself reports a failed save. A folder written here still opens
with `ocp.CheckpointManager` and `ocp.StandardCheckpointer`.

With several processes `active_processes` is always set: orbax then waits at barriers of the coordination service, which
time out, and not in a psum over all devices, which has no timeout and can interleave with collectives of the step.

Arrays are zarr3, and each chunk has a checksum, which tensorstore checks as it reads, on any mesh.

orbax 0.12.8 and tensorstore 0.1.86 have no option for what `patch_orbax` changes, and no upstream issue of these points
was found on 2026-11-26. A test pins each patch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_utils import construct_restore_args

from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.record import INDEX_FOLDER, STATE_FOLDER


def open_checkpointer(
    num_processes: int,
    timeout_s: float,
    barrier: Callable[..., None],
    before_commit: Callable[[], None],
    separate: bool = False,
) -> ocp.AsyncCheckpointer:
    """Returns a checkpointer; `before_commit` runs in the background on process 0, when all files are written.

    Args:
        barrier: of several processes, in the background (save_barrier.py).
        separate: each of several processes writes its part to its own folder, without barriers, and runs
            `before_commit`; `merge_parts` makes one step of the parts.
    """
    patch_orbax(separate)
    processes = set(range(num_processes)) if num_processes > 1 else None
    options = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=processes, barrier_sync_key_prefix="spmdkit"
    )
    if separate:
        me = jax.process_index()
        options = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={me}, barrier_sync_key_prefix=f"spmdkit{me}"
        )
        barrier = lambda **_: None
    # Apart, each process makes its folders itself: the signal that they are there would reach the others.
    folders_later = ocp.AsyncOptions(create_directories_asynchronously=not separate)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options, async_options=folders_later),
        **{STATE_FOLDER: ocp.PyTreeCheckpointHandler(use_zarr3=True, multiprocessing_options=options)},
    )
    return ocp.AsyncCheckpointer(
        handler,
        async_options=dataclasses.replace(
            folders_later,
            timeout_secs=max(1, round(timeout_s)),
            barrier_sync_fn=barrier if num_processes > 1 else None,
            post_finalization_callback=before_commit,
        ),
        multiprocessing_options=options,
    )


def patch_orbax(separate: bool = False) -> None:
    """Replaces private functions of orbax, once each.

    - chunks with checksums (tests/checkpoint/test_checkpoint_flips.py);
    - indexes without compression: zstd keeps 3.6 MB for kilobytes. `separate`: in files of their own, so that
      `merge_parts` needs none of the arrays' files (test_checkpoint_processes.py);
    - no call of the two functions of tensorstore that leak their result: 25 KiB a save and 0.3 KiB an array
      (test_checkpoint_growth.py, benchmarks/save_growth.py);
    - deadlines by a monotonic clock: a clock that is set during a save would end it on some processes, and the others
      would wait for them (test_checkpoint_deadlines.py);
    - all parts of a save or a restore are cancelled when one has failed, and no traceback is printed for each of them
      (test_checkpoint_write_errors.py).
    """
    from orbax.checkpoint._src import asyncio_utils
    from orbax.checkpoint._src.checkpointers import async_checkpointer
    from orbax.checkpoint._src.futures import future, signaling_client
    from orbax.checkpoint._src.serialization import tensorstore_utils as utils

    utils._build_zarr3_metadata = functools.partial(_with_checksums, _original(utils._build_zarr3_metadata))
    write_options = _original(utils._add_ocdbt_write_options)
    utils._add_ocdbt_write_options = functools.partial(_plain_index, write_options, separate)
    utils.get_tensorstore_raw_bytes = lambda direction: 0
    if not isinstance(utils.ts, types.SimpleNamespace):
        kvstore = types.SimpleNamespace(open=utils.ts.KvStore.open, Spec=functools.partial(_spec, utils.ts))
        utils.ts = types.SimpleNamespace(**vars(utils.ts) | {"KvStore": kvstore})
    steady: Any = types.SimpleNamespace(**vars(time) | {"time": time.monotonic})
    future.time = signaling_client.time = async_checkpointer.time = steady
    asyncio_utils._run_sync_via_new_loop = lambda part: asyncio.run(part)  # which cancels what is left
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    sys.unraisablehook = functools.partial(_quiet_after_failure, _original(sys.unraisablehook))


def _original(function: Any) -> Any:
    """Returns the function that a patch of this file has replaced, or the function itself."""
    is_patched = getattr(function, "func", None) in (_with_checksums, _plain_index, _quiet_after_failure)
    return function.args[0] if is_patched else function


SMALL = 2**18
"""Elements of a chunk, of 1 to 8 bytes each."""


def _with_checksums(build: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the metadata of a zarr3 array with a checksum in each chunk. Readers need nothing of spmdkit.

    The checksum is zstd's own: the low 32 bits of XXH64 over the values, 0.07 to 0.13 s a GiB of one core; crc32c over
    the compressed bytes takes 0.2 to 0.4. It misses some ten bits in the head of a chunk that change no value, so a
    chunk of less than `SMALL` elements, where one bit in so many is of its head, also has a crc32c.

    zstd has the level 1 of orbax's zarr2: level 3, its choice for zarr3, takes 2.5 s a GiB of random floats for the
    same size, 1 takes 1.9 (one core, 2026-11-23).
    """
    metadata = build(*args, **kwargs)
    for codec in metadata["codecs"]:
        if codec["name"] == "sharding_indexed":
            inner = codec["configuration"]["codecs"]
            for one in inner:
                if one["name"] == "zstd":
                    one["configuration"] = {"level": 1, "checksum": True}
            if math.prod(codec["configuration"]["chunk_shape"]) < SMALL or inner[-1]["name"] != "zstd":
                inner.append({"name": "crc32c"})
    return metadata


def _plain_index(add: Callable[..., None], separate: bool, spec: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    add(spec, *args, **kwargs)
    spec["config"]["compression"] = None
    if separate:
        spec["btree_node_data_prefix"] = spec["version_tree_node_data_prefix"] = f"{INDEX_FOLDER}/"


class _Folder(dict[str, Any]):
    """The JSON of a folder, which `tensorstore.KvStore.open` takes too."""

    to_json = dict.copy


def _spec(tensorstore: Any, spec: dict[str, Any]) -> Any:
    """Returns `tensorstore.KvStore.Spec(spec)`, for a folder without tensorstore."""
    is_folder = spec.keys() == {"driver", "path"} and spec["driver"] == "file" and spec["path"].endswith("/")
    return _Folder(spec) if is_folder else tensorstore.KvStore.Spec(spec)


NO_NEWS = ("Global object size logging disabled", "unhandled exception during asyncio.run() shutdown")


def _is_news(record: logging.LogRecord) -> bool:
    """Returns whether a log record is none of these: the traceback of a failed save, which is raised to the caller; a
    further failure of its parts; the remark that a size is not logged."""
    text = record.getMessage()
    is_traceback = bool(record.exc_info) and "orbax" in record.pathname
    return not (is_traceback or "write_fragment" in text or text.startswith(NO_NEWS))


def _quiet_after_failure(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Drops the traceback of each array that tensorstore still wrote or read, from its own threads, after a failure."""
    error = unraisable.exc_value
    is_late_write = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    is_late_read = isinstance(getattr(error, "__cause__", None), GeneratorExit) and "reading array" in str(error)[:80]
    if not is_late_write and not is_late_read:
        before(unraisable)


def merge_parts(folder: Path) -> None:
    """Makes one step of the parts of several processes, as orbax does: of each the index is in `folder`,
    `state/ocdbt.process_N/`; arrays stay where they are."""
    from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

    # Private: pinned by tests/checkpoint/test_checkpoint_processes.py.
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    state = epath.Path(str(folder / STATE_FOLDER))
    asyncio.run(ocdbt_utils.merge_ocdbt_per_process_files(state, context, use_zarr3=True))


def close(checkpointer: ocp.AsyncCheckpointer) -> None:
    """Stops the threads of the checkpointer. orbax raises the error of a failed save again here; it was reported
    before."""
    with contextlib.suppress(Exception):
        checkpointer.close()


def start_save(checkpointer: ocp.AsyncCheckpointer, folder: Location, tree: dict[str, Any]) -> None:
    """Copies the arrays to the host and returns; they are written and committed in the background."""
    checkpointer.save(str(folder), args=ocp.args.Composite(**{STATE_FOLDER: ocp.args.PyTreeSave(tree)}))


def signal_folders_created() -> None:
    """Signals on process 0 that the folders of a save exist. The other processes wait for that before they write; they
    learn of the failure afterwards."""
    from orbax.checkpoint._src.futures import future  # private: pinned by tests/checkpoint/test_checkpoint_processes.py

    if jax.process_index() == 0:
        with contextlib.suppress(RuntimeError):  # the service is gone, and with it the others
            signals = future.AwaitableSignalsContract.get_awaitable_signals_from_contract()
            operation = future.synchronization.OperationIdGenerator.get_current_operation_id()
            future.set_signals(signals, operation_id=operation)


def load(
    checkpointer: ocp.AsyncCheckpointer, folder: Location, tree: dict[str, Any], partial: bool = False
) -> dict[str, Any]:
    """Returns the arrays of a step. `tree`: jax.ShapeDtypeStruct with shardings, the structure of the whole step
    (`partial`: of a part)."""
    args = ocp.args.PyTreeRestore(item=tree, restore_args=construct_restore_args(tree), partial_restore=partial)
    # Not `checkpointer.restore`, which ends in a barrier: where one process finds damage, the others must not wait
    # there.
    restored = checkpointer.handler.restore(epath.Path(str(folder)), args=ocp.args.Composite(**{STATE_FOLDER: args}))
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


def read_leaf(folder: Path, path: str) -> None:
    """Reads one array of a step, whole, in the way that orbax does, and drops it."""
    import tensorstore as ts

    store = {"driver": "ocdbt", "base": (folder / STATE_FOLDER).as_uri() + "/", "path": path.replace("/", ".") + "/"}
    ts.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result().read().result()


def write_plain(folder: Path, tree: dict[str, Any]) -> None:
    """Writes a nested dict of numpy arrays as its own orbax checkpoint, and waits for it."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(str(folder), tree)
        checkpointer.wait_until_finished()
