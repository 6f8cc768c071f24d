"""The one place that calls orbax: an asynchronous checkpointer of one nested dict of arrays per step.

AsyncCheckpointer and not CheckpointManager: which steps exist is read from the disk at each question (the manager
caches it, and counts steps that never committed), what is kept is decided after the commit, and a failed save is ours
to report.
A folder written here opens with `ocp.CheckpointManager` and `ocp.StandardCheckpointer` all the same.

`active_processes` is always given with several processes: orbax then meets at barriers of the coordination service,
which time out, and not in a psum over all devices, which has no timeout and can interleave with collectives of the
step.

Arrays are zarr3, and each chunk has a checksum, which tensorstore checks as it reads, whoever reads it on whatever
mesh. orbax 0.12.8 has no option for that, so its list of codecs is changed where it is made (`write_chunk_checksums`);
a test reads the codecs back from the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_utils import construct_restore_args

from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.record import INDEX_FOLDER, STATE_FOLDER
from spmdkit.foundation.timeouts import SAVE_CANCEL_S


def open_checkpointer(
    num_processes: int,
    timeout_s: float,
    barrier: Callable[..., None],
    before_commit: Callable[[], None],
    separate: bool = False,
) -> ocp.AsyncCheckpointer:
    """Returns a checkpointer; `before_commit` runs in the background on process 0, when all files are written.

    Args:
        barrier: where several processes meet in the background (save_barrier.py).
        separate: each of several processes writes its part to its own folder, without barriers, and runs
            `before_commit`.
            `merge_parts` makes one step of the parts.
    """
    write_chunk_checksums()
    write_plain_indexes(separate)
    intern_names(f"{name}{i}" for name in ("ocdbt.process_", "process_") for i in range(num_processes))
    avoid_tensorstore_leaks()
    use_monotonic_deadlines()
    cancel_after_failure()
    logging.getLogger("absl").addFilter(_drop_orbax_tracebacks)
    logging.getLogger("absl").addFilter(_drop_size_warning)
    logging.getLogger("asyncio").addFilter(_drop_further_failures)
    if getattr(sys.unraisablehook, "func", None) is not _quiet_after_failure:
        sys.unraisablehook = functools.partial(_quiet_after_failure, sys.unraisablehook)
    processes = set(range(num_processes)) if num_processes > 1 else None
    options = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=processes, barrier_sync_key_prefix="spmdkit"
    )
    if separate:
        me = jax.process_index()
        options = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={me}, barrier_sync_key_prefix=f"spmdkit{me}"
        )
        barrier = _no_barrier
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


def _no_barrier(*, key: str, timeout_ms: int) -> None:
    """In place of a barrier."""


def write_chunk_checksums() -> None:
    """From now on orbax writes zarr3 arrays with a checksum in each chunk, compressed as it is. Readers need nothing of
    ours.

    The checksum is zstd's own: the low 32 bits of XXH64 over the values, 0.07 to 0.13 s a GiB of one core; crc32c over
    what zstd makes of them takes 0.2 to 0.4.
    It lets pass some ten bits in the head of a chunk that change no value (what the decoder ignores, and the flag of
    the checksum itself), so a chunk of less than `SMALL` elements, where one bit in so many is of its head, has a
    crc32c behind it too.

    zstd stays at the level 1 of orbax's zarr2: level 3, its choice for zarr3, takes 2.5 s a GiB of random floats for
    the same size, 1 takes 1.9 (one core, 2026-11-23).
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build: Any = tensorstore_utils._build_zarr3_metadata  # private: pinned by tests/checkpoint/test_checkpoint_flips.py
    if getattr(build, "func", None) is not _with_checksums:
        tensorstore_utils._build_zarr3_metadata = functools.partial(_with_checksums, build)


SMALL = 2**18
"""Elements of a chunk, of 1 to 8 bytes each."""


def write_plain_indexes(separate: bool = False) -> None:
    """Makes orbax write the index of a checkpoint, which locates each array in its files, without compression. Readers
    need nothing of ours.

    tensorstore's choice, zstd at level 3, takes 3.6 MB for each index that is written at a time, for kilobytes, and
    keeps them: process 0 of several, which writes that of all, grew by as much now and then.

    Args:
        separate: in files of their own too, so that `merge_parts` needs none of the arrays' files.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    # Private: pinned by tests/checkpoint/test_checkpoint_growth.py.
    add: Any = tensorstore_utils._add_ocdbt_write_options
    add = add.args[0] if getattr(add, "func", None) is _plain_index else add
    tensorstore_utils._add_ocdbt_write_options = functools.partial(_plain_index, add, separate)


def _plain_index(add: Callable[..., None], separate: bool, spec: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    add(spec, *args, **kwargs)
    spec["config"]["compression"] = None
    if separate:
        spec["btree_node_data_prefix"] = spec["version_tree_node_data_prefix"] = f"{INDEX_FOLDER}/"


def merge_parts(folder: Path) -> None:
    """Makes one step of the parts of several processes, as orbax does: of each the index is in `folder`,
    `state/ocdbt.process_N/`; arrays stay where they are."""
    from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

    # Private: pinned by tests/checkpoint/test_checkpoint_apart.py.
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    state = epath.Path(str(folder / STATE_FOLDER))
    asyncio.run(ocdbt_utils.merge_ocdbt_per_process_files(state, context, use_zarr3=True))


def intern_names(names: Iterable[str]) -> None:
    """Interns the names that orbax and tensorstore use at each save: `names`, and three of tensorstore.

    Otherwise CPython interns them again at each save, and its table of interned strings grows by 2 to 4 MB now and
    then.
    """
    _names.update(map(sys.intern, ("recheck_cached", "repeatable_read", "adjustable", *names)))


_names: set[str] = set()


def avoid_tensorstore_leaks() -> None:
    """Avoids two calls of tensorstore 0.1.86 that leak the JSON that they return
    (benchmarks/save_growth.py shows both alone).

    The bytes that were written, for a line of its log: some 25 KiB a save. And for each array what a folder is as JSON:
    0.3 KiB an array and save.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils as utils

    # Private; where these have other names, nothing is lost but the memory. Pinned by
    # tests/checkpoint/test_checkpoint_growth.py.
    utils.get_tensorstore_raw_bytes = _no_bytes
    if not isinstance(utils.ts, _Overlay):
        real = utils.ts
        utils.ts = _Overlay(real, KvStore=_Overlay(real.KvStore, Spec=functools.partial(_spec, real)))


def use_monotonic_deadlines() -> None:
    """Keeps a clock that is set forward during a save from ending the save on some processes, for which the others then
    wait.

    orbax 0.12.8 takes the deadlines of its background threads from `time.time`; where the module has another name, that
    stays so.
    """
    from orbax.checkpoint._src.futures import future, signaling_client

    steady = types.SimpleNamespace(**{**vars(time), "time": time.monotonic})
    future.time = signaling_client.time = steady  # type: ignore[attr-defined]
    future.get_remaining_time = _remaining_s


def _remaining_s(start_time: float, timeout_secs: float | None) -> float | None:
    """Returns the seconds that are left of `timeout_secs`; `start_time` is of some clock of orbax's, so the time
    counts from the first call with it."""
    if timeout_secs is None:
        return None
    now = time.monotonic()
    with _lock:
        elapsed_s = now - _begun.setdefault(start_time, now)
        while len(_begun) > MAX_DEADLINES:
            del _begun[next(iter(_begun))]
    if elapsed_s >= timeout_secs:
        raise TimeoutError(f"Timed out after {elapsed_s} seconds.")
    return timeout_secs - elapsed_s


MAX_DEADLINES = 64
_begun: dict[float, float] = {}
_lock = threading.Lock()


def _no_bytes(*_: Any) -> int:
    return 0


class _Overlay:
    """A module or class with other attributes in place of some; all else is its own."""

    def __init__(self, real: Any, **others: Any):
        self.__dict__.update(others, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Folder(dict):
    """What a folder is as JSON, for `tensorstore.KvStore.open` too."""

    def to_json(self) -> dict[str, Any]:
        return dict(self)


def _spec(tensorstore: Any, spec: dict[str, Any]) -> Any:
    """Returns `tensorstore.KvStore.Spec(spec)`; for a folder, an object with `to_json` that returns the same without
    tensorstore."""
    if spec.keys() == {"driver", "path"} and spec["driver"] == "file" and spec["path"].endswith("/"):
        return _Folder(spec)
    return tensorstore.KvStore.Spec(spec)


def _with_checksums(build: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
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


def _drop_orbax_tracebacks(record: logging.LogRecord) -> bool:
    """Keeps orbax from printing the traceback of a failed save: we raise it, with its cause, in the caller's thread."""
    return not (record.exc_info and "orbax" in record.pathname)


def _drop_size_warning(record: logging.LogRecord) -> bool:
    """Returns whether a record is no remark, made twice a save of parts that lie separate, that their size is logged
    nowhere."""
    return not str(record.msg).startswith("Global object size logging disabled")


def _drop_further_failures(record: logging.LogRecord) -> bool:
    """Returns whether a record is no second failure of a save: orbax raises the first part that could not be written,
    asyncio logs the others."""
    return "write_fragment" not in record.getMessage()


def cancel_after_failure() -> None:
    """From now on orbax ends all parts of a save or a restore when one has failed.

    orbax 0.12.8 closes its event loop on them, and Python warns much later that some of them were never awaited.
    """
    from orbax.checkpoint._src import asyncio_utils

    run: Any = (
        asyncio_utils._run_sync_via_new_loop
    )  # private: pinned by tests/checkpoint/test_checkpoint_write_errors.py
    if getattr(run, "func", None) is not _run_and_cancel:
        asyncio_utils._run_sync_via_new_loop = functools.partial(_run_and_cancel, run)


def _run_and_cancel(run: Callable[..., Any], part: Coroutine[Any, Any, Any]) -> Any:
    async def cancelling() -> Any:
        try:
            return await part
        except BaseException:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            if others:
                await asyncio.wait(others, timeout=SAVE_CANCEL_S)
            raise

    return run(cancelling())


def _quiet_after_failure(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Keeps tensorstore from printing one traceback for each array that it still wrote or read when a failure had ended
    that.

    orbax closes its event loop at the first failed write, and the others report to it from tensorstore's own threads;
    at the first failed read it drops the others (orbax 0.12.8). The failure itself is raised to us.
    """
    error = unraisable.exc_value
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return
    if isinstance(getattr(error, "__cause__", None), GeneratorExit) and "reading array index" in str(error)[:80]:
        return
    before(unraisable)


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
    for driver in ("zarr3", "zarr"):  # zarr: of before there were checksums
        try:
            array = ts.open({"driver": driver, "kvstore": store}, open=True, read=True).result()
        except ValueError as error:
            if "NOT_FOUND" in str(error) and driver == "zarr3":
                continue
            raise
        array.read().result()
        return


def write_plain(folder: Path, tree: dict[str, Any]) -> None:
    """Writes a nested dict of numpy arrays as its own orbax checkpoint, and waits for it."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(str(folder), tree)
        checkpointer.wait_until_finished()
