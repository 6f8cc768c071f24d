"""The only file that calls orbax: an asynchronous checkpointer of one nested dict of arrays per step.

It uses AsyncCheckpointer, not CheckpointManager: the manager caches the list of steps and counts uncommitted steps,
retention must run after the commit, and spmdkit reports failed saves. `ocp.CheckpointManager` and
`ocp.StandardCheckpointer` can open a folder written here.

With several processes `active_processes` is always set: orbax then waits at barriers of the coordination service, which
time out, instead of in a psum over all devices, which has no timeout and can interleave with collectives of the step.

Arrays are zarr3. Each chunk has a checksum, which tensorstore verifies during a read, on any mesh.

orbax 0.12.8 and tensorstore 0.1.86 have no option for the behavior that `patch_orbax` changes. No upstream issue was
found on 2026-11-26. A test pins each patch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
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
    """Returns a checkpointer. `before_commit` runs in the background on process 0 after all files are written.

    Args:
        barrier: the barrier of several processes, called in the background (save_barrier.py).
        separate: each of several processes writes its part to a separate folder, without barriers, and runs
            `before_commit`. `merge_parts` merges the parts into one step.
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
    # With separate folders each process creates its own: the signal that they exist would reach all processes.
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
    """Replaces private functions of orbax, each at most once.

    - Chunks have checksums (tests/checkpoint/test_checkpoint_flips.py).
    - Indexes are not compressed: zstd retains 3.6 MB for kilobytes. `separate`: indexes are in separate files, so that
      `merge_parts` reads no array files (test_checkpoint_processes.py).
    - Two functions of tensorstore that leak their result are not called: 25 KiB per save and 0.3 KiB per array
      (test_checkpoint_growth.py, benchmarks/save_growth.py).
    - Deadlines use a monotonic clock: otherwise a clock that is set during a save ends it on some processes while the
      others wait for them (test_checkpoint_deadlines.py).
    - If one part of a save or a restore fails, the other parts are cancelled without a traceback for each
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
    asyncio_utils._run_sync_via_new_loop = lambda part: asyncio.run(part)  # cancels the remaining tasks
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    sys.unraisablehook = functools.partial(_quiet_after_failure, _original(sys.unraisablehook))


def _original(function: Any) -> Any:
    """Returns the original of a function that this file has patched, or the function itself."""
    is_patched = getattr(function, "func", None) in (_with_checksums, _plain_index, _quiet_after_failure)
    return function.args[0] if is_patched else function


SMALL = 2**18
"""Number of elements in a chunk, 1 to 8 bytes per element."""


def _with_checksums(build: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the metadata of a zarr3 array with a checksum in each chunk. Readers do not need spmdkit.

    The checksum is the one of zstd: the low 32 bits of XXH64 over the values, 0.07 to 0.13 s per GiB on one core.
    crc32c over the compressed bytes takes 0.2 to 0.4 s. The zstd checksum misses about ten header bits of a chunk that
    change no value. A chunk of less than `SMALL` elements has a larger share of such bits, so it also has a crc32c.

    The zstd level is 1, as in orbax's zarr2. Level 3, orbax's choice for zarr3, takes 2.5 s per GiB of random floats
    for the same size, level 1 takes 1.9 s (one core, 2026-11-23).
    """
    metadata = build(*args, **kwargs)
    for codec in metadata["codecs"]:
        if codec["name"] == "sharding_indexed":
            inner = codec["configuration"]["codecs"]
            for inner_codec in inner:
                if inner_codec["name"] == "zstd":
                    inner_codec["configuration"] = {"level": 1, "checksum": True}
            if math.prod(codec["configuration"]["chunk_shape"]) < SMALL or inner[-1]["name"] != "zstd":
                inner.append({"name": "crc32c"})
    return metadata


def _plain_index(add: Callable[..., None], separate: bool, spec: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    add(spec, *args, **kwargs)
    spec["config"]["compression"] = None
    if separate:
        spec["btree_node_data_prefix"] = spec["version_tree_node_data_prefix"] = f"{INDEX_FOLDER}/"


class _Folder(dict[str, Any]):
    """The JSON of a folder, in a form that `tensorstore.KvStore.open` also accepts."""

    to_json = dict.copy


def _spec(tensorstore: Any, spec: dict[str, Any]) -> Any:
    """Returns `tensorstore.KvStore.Spec(spec)`; for a folder, an equivalent that does not use tensorstore."""
    is_folder = spec.keys() == {"driver", "path"} and spec["driver"] == "file" and spec["path"].endswith("/")
    return _Folder(spec) if is_folder else tensorstore.KvStore.Spec(spec)


NO_NEWS = ("Global object size logging disabled", "unhandled exception during asyncio.run() shutdown")


def _is_news(record: logging.LogRecord) -> bool:
    """Returns False for log records that only repeat known facts: the traceback of a failed save (raised to the
    caller), further failures of its parts, and the note that a size is not logged."""
    text = record.getMessage()
    is_traceback = bool(record.exc_info) and "orbax" in record.pathname
    return not (is_traceback or "write_fragment" in text or text.startswith(NO_NEWS))


def _quiet_after_failure(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Drops the tracebacks of arrays that threads of tensorstore were still writing or reading after a failure."""
    error = unraisable.exc_value
    is_late_write = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    is_late_read = isinstance(getattr(error, "__cause__", None), GeneratorExit) and "reading array" in str(error)[:80]
    if not is_late_write and not is_late_read:
        before(unraisable)


def merge_parts(folder: Path) -> None:
    """Merges the parts of several processes into one step, as orbax does. The index of each part is in `folder`,
    `state/ocdbt.process_N/`. Arrays are not moved."""
    from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

    # Private: pinned by tests/checkpoint/test_checkpoint_processes.py.
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    state = epath.Path(str(folder / STATE_FOLDER))
    asyncio.run(ocdbt_utils.merge_ocdbt_per_process_files(state, context, use_zarr3=True))


def close(checkpointer: ocp.AsyncCheckpointer) -> None:
    """Stops the threads of the checkpointer. orbax raises the error of a failed save here again; it is already
    reported."""
    with contextlib.suppress(Exception):
        checkpointer.close()


_ON_DISK = {
    **dict.fromkeys(("uint1", "uint2", "uint4"), "uint8"),
    "int1": "int8",
    "float8_e4m3": "bfloat16",
}
"""Dtypes that tensorstore lacks (0.1.86) -> a wider one with the same values."""


def _on_disk(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns arrays (or abstract arrays) in dtypes that tensorstore has."""

    def wider(x: Any) -> Any:
        if (name := _ON_DISK.get(str(x.dtype))) is None:
            return x
        is_abstract = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(dtype=jax.numpy.dtype(name)) if is_abstract else x.astype(name)

    return jax.tree.map(wider, tree)  # type: ignore[no-any-return]


def _from_disk(tree: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    def narrower(x: Any, leaf: Any) -> Any:
        if str(leaf.dtype) not in _ON_DISK:
            return x
        x = x.astype(leaf.dtype)
        return x if isinstance(x, np.ndarray) else jax.device_put(x, leaf.sharding)

    return jax.tree.map(narrower, tree, like)  # type: ignore[no-any-return]


def start_save(checkpointer: ocp.AsyncCheckpointer, folder: Location, tree: dict[str, Any]) -> None:
    """Copies the arrays to the host and returns. A background thread writes and commits them."""
    checkpointer.save(str(folder), args=ocp.args.Composite(**{STATE_FOLDER: ocp.args.PyTreeSave(_on_disk(tree))}))


def signal_folders_created() -> None:
    """Signals on process 0 that the folders of a save exist. The other processes wait for this before they write, and
    detect the failure afterwards."""
    from orbax.checkpoint._src.futures import future  # private: pinned by tests/checkpoint/test_checkpoint_processes.py

    if jax.process_index() == 0:
        with contextlib.suppress(RuntimeError):  # the coordination service has ended, and the other processes with it
            signals = future.AwaitableSignalsContract.get_awaitable_signals_from_contract()
            operation = future.synchronization.OperationIdGenerator.get_current_operation_id()
            future.set_signals(signals, operation_id=operation)


def load(
    checkpointer: ocp.AsyncCheckpointer, folder: Location, tree: dict[str, Any], partial: bool = False
) -> dict[str, Any]:
    """Returns the arrays of a step. `tree`: jax.ShapeDtypeStruct with shardings, the structure of the complete step
    (`partial`: of a part)."""
    item = _on_disk(tree)
    args = ocp.args.PyTreeRestore(item=item, restore_args=construct_restore_args(item), partial_restore=partial)
    # Not `checkpointer.restore`, which ends in a barrier: if one process finds damage, the others would wait there.
    restored = checkpointer.handler.restore(epath.Path(str(folder)), args=ocp.args.Composite(**{STATE_FOLDER: args}))
    return _from_disk(restored[STATE_FOLDER], tree)


def open_array(folder: Path, name: str, zarr3: bool = True, ocdbt: bool = True) -> Any:
    """Returns a tensorstore of one array of a checkpoint. `folder`: of its arrays; `name`: its path, joined by dots."""
    import tensorstore as ts

    inside = {"driver": "ocdbt", "base": f"{folder.as_uri()}/", "path": f"{name}/"}
    store = inside if ocdbt else {"driver": "file", "path": f"{folder / name}/"}
    driver = "zarr3" if zarr3 else "zarr"
    return ts.open({"driver": driver, "kvstore": store}, open=True, read=True).result()


def read_leaf(folder: Path, path: str) -> None:
    """Reads one complete array of a step, with the same code path as orbax, and discards it."""
    open_array(folder / STATE_FOLDER, path.replace("/", ".")).read().result()


def plain_arrays(folder: Path) -> dict[str, tuple[tuple[int, ...], Any, Callable[[], Any]]]:
    """Returns `{path: (shape, dtype, a function that opens it)}` of the arrays of a checkpoint that orbax wrote."""
    metadata = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
    form = bool(metadata.get("use_zarr3")), (folder / "manifest.ocdbt").exists()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(str(folder)).item_metadata.tree
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "directory"))[0]
    keys = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    return {
        path: (tuple(leaf.shape), jax.numpy.dtype(leaf.dtype), functools.partial(open_array, folder, leaf.name, *form))
        for path, leaf in keys
        if getattr(leaf, "shape", None) is not None and leaf.dtype is not None
    }


def write_plain(folder: Path, tree: dict[str, Any]) -> None:
    """Writes a nested dict of numpy arrays as a separate orbax checkpoint, and waits until it is written."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(str(folder), _on_disk(tree))
        checkpointer.wait_until_finished()
