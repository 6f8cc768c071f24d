"""`Checkpoints`: the checkpoints of one run, saved asynchronously and restored onto any mesh.

`save` blocks only while the arrays are copied to the host. A background thread writes and commits one save at a time
and deletes old steps. Every process of a run creates one `Checkpoints` and calls `save` and `restore` at the same
steps. Process 0 writes the record, commits and deletes. orbax writes to gs:// directly. Steps for other buckets pass
through a local folder of each process (staging.py), and the last object written commits the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdkit.checkpoint import location, state_dict
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint import restore as checkpoint_restore
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.retention import RetentionRules, delete_old, delete_step, remove_uncommitted, remove_unfinished
from spmdkit.checkpoint.save_barrier import Exchange, SaveBarrier, SaveResult
from spmdkit.checkpoint.staging import staging_of
from spmdkit.errors import CheckpointWriteError, ConfigError, UnreachableError
from spmdkit.foundation import files, phase
from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.timeouts import SAVE_POLL_S

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

REMOVE_TRIES = 40
FREE_MARGIN_BYTES = 2**20
"""Disk space reserved for metadata, in addition to the arrays."""


class Checkpoints:
    """The checkpoints in one directory.

    Args:
        directory: holds `<step>/` folders; created if missing. Unfinished saves of a killed run are deleted from it, so
            the caller must hold the lock of the run.
        retention: rules for the steps to retain; None: all.
        timeout_s: maximum time for all processes to write a save.
        is_main, num_processes: the role of this process.
        cluster: required with several processes, to agree on the start and the result of each save.
        is_owner: whether this run still owns the directory; if not, nothing is committed or deleted.
        stage: local folder of this process for steps uploaded to or fetched from a bucket; default: a temporary folder.
        run_files: local files that are copied next to the steps of a bucket at each commit.

    Attributes:
        saved_step: the step of the newest state that is committed or being written; 0: none.
        unfinished_step: step of the newest save until it is committed, also of a failed one; equal on all processes.
        on_commit: called with the step of each commit, in the background.
    """

    saved_step = 0
    unfinished_step: int | None = None

    def __init__(
        self,
        directory: Location | str,
        *,
        retention: RetentionRules | None = None,
        timeout_s: float = 600,
        is_main: bool = True,
        num_processes: int = 1,
        cluster: Exchange | None = None,
        is_owner: Callable[[], bool] = lambda: True,
        stage: Path | None = None,
        run_files: Sequence[Path] = (),
    ):
        self.directory: Location = location.resolve(directory)
        self._retention, self._timeout_s = retention, timeout_s
        self._is_main, self._num_processes = is_main, num_processes
        self._is_ours, self._run_files = is_owner, tuple(run_files)
        self._staging = staging_of(self.directory, stage)
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self.on_commit: Callable[[int], None] = lambda step: None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._draft: records.Record | None = None
        self._structure: state_dict.StateStructure | None = None
        self._committed: list[int] = []  # by this process, in order
        self._restored: int | None = None
        self._num_reported = 0  # of `_committed`, reported by `new_commits` or `wait`
        self._is_abandoned = False
        self._barrier = SaveBarrier(cluster, num_processes, is_main, timeout_s)
        if is_main:
            try:
                if isinstance(self.directory, Path):
                    self.directory.mkdir(mode=files.FOLDER_MODE, parents=True, exist_ok=True)
                remove_unfinished(self.directory)
            except OSError as error:
                raise files.write_error(
                    error,
                    f"checkpoints go to {self.directory}, which cannot be used ({records.first_line(error)}). "
                    "It must be a folder with write permission and free space. Set run_dir to one.",
                ) from error

    def steps(self) -> list[int]:
        """Returns the committed steps on disk, ascending."""
        return records.committed_steps(self.directory)

    @property
    def _write_directory(self) -> Location:
        return self.directory if self._staging is None else self._staging.written

    def last_committed(self) -> int | None:
        """Returns the newest committed step. For a bucket: the newest that this process has saved or restored, without
        network access."""
        if not isinstance(self.directory, Remote):
            return self.latest()
        return self._committed[-1] if self._committed else self._restored

    def latest(self) -> int | None:
        """Returns the newest committed step on disk, for process 0."""
        steps = self.steps()
        return steps[-1] if steps else None

    def save(
        self, step: int, state: Any, record: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Starts saving `state` as `step`; returns when the arrays may be donated. `finish_save` and `wait` report the
        result.

        Args:
            record: JSON data that `restore` returns: config, versions, seed, data position.
            metrics: values for retention of the best steps.

        Raises:
            CheckpointWriteError: an earlier save failed (this one is not started), the step exists, the disk has too
                little space, or orbax raised.
            ConfigError: a leaf cannot be saved (see `state_dict.leaf_table`).
        """
        self._join()
        self.unfinished_step = step
        self._structure, arrays = state_dict.structure_of(state, self._structure)
        form = self._structure
        self._barrier.begin(
            refusal_reason(self.directory, self._write_directory, step, form.num_bytes) if self._is_main else ""
        )
        # The record describes leaves without elements: orbax does not save them.
        flat = {path: array for path, array in zip(form.table, arrays, strict=True) if array.size}
        self._draft = records.Record(
            step=step,
            time=time.time(),
            num_processes=self._num_processes,
            bytes=form.num_bytes,
            metrics=records.finite_metrics(metrics or {}),
            leaves=form.table,
            files={},
            user=json.loads(json.dumps(record, allow_nan=False)),
            best=None if self._retention is None else self._retention.best_metric,
        )
        from spmdkit.checkpoint import orbax_backend

        try:
            orbax_backend.start_save(self._orbax(), self._write_directory / str(step), state_dict.nest(flat))
        except Exception as error:
            self._abort(step, error)
            failed = save_failed(self.directory, step, error)
            failed.__cause__ = error
            if self._num_processes == 1:
                raise failed from error
            self._pending = Future()  # the other processes are writing: `finish_save` reports the failure to all
            self._pending.set_exception(failed)
        else:
            self._pending = self._background.submit(self._finish, step)
        self.saved_step = step

    def _orbax(self) -> ocp.AsyncCheckpointer:
        if self._checkpointer is None:
            from spmdkit.checkpoint import orbax_backend

            self._checkpointer = orbax_backend.open_checkpointer(
                self._num_processes, self._timeout_s, self._barrier.barrier, self._before_commit, self._writes_parts
            )
        return self._checkpointer

    @property
    def _writes_parts(self) -> bool:
        return self._staging is not None and self._num_processes > 1

    def _before_commit(self) -> None:
        assert self._draft is not None
        if not self._writes_parts:
            self._add_record(self._unfinished(self._draft.step), {})

    def _add_record(self, folder: Location, elsewhere: Mapping[str, int]) -> None:
        """Writes record.json next to the finished arrays. `elsewhere`: sizes of files of the step that `folder` does
        not have to contain (it does contain the small ones)."""
        assert self._draft is not None
        if not self._is_ours():
            raise ConfigError(f"{self.directory} belongs to another run now, so nothing is committed to it.")
        sizes = {**elsewhere, **records.list_files(folder)}
        digests = records.digest_files(folder, sizes)
        records.write_record(folder, dataclasses.replace(self._draft, files=sizes, digests=digests))
        if isinstance(self.directory, Remote):
            for path in filter(Path.exists, self._run_files):
                whole_lines = path.read_bytes().rpartition(b"\n")[0] + b"\n"
                (self.directory / location.RUN_FOLDER / path.name).write_bytes(whole_lines)

    def _unfinished(self, step: int) -> Location:
        mark = "" if isinstance(self._write_directory, Remote) else records.TEMPORARY_MARK
        return self._write_directory / f"{step}{mark}"

    def _finish(self, step: int) -> None:
        """Waits for the commit, then deletes old steps. Runs in the background on every process."""
        try:
            self._orbax().wait_until_finished()
            if self._is_main and isinstance(self.directory, Path):
                files.restrict_permissions(self.directory / str(step))
                files.sync_folder(self.directory)
            if self._staging is not None and self._writes_parts:
                self._staging.commit_parts(step, self._is_ours, self._barrier, self._add_record)
            elif self._staging is not None:
                self._staging.commit(step, self._is_ours)
        except Exception as error:
            self._abort(step, error)
            raise save_failed(self.directory, step, error) from error
        self._committed.append(step)
        if not self._is_abandoned:
            self.on_commit(step)
        if self._is_main and self._retention is not None:
            delete_old(self.directory, step, self._retention)

    def _abort(self, step: int, error: BaseException) -> None:
        """Releases the other processes from the barrier and deletes the files. With several processes `finish_save`
        deletes them after all have ended: a process that still writes can block in tensorstore (0.1.86: one of eight,
        2026-11-24)."""
        if self._num_processes == 1:
            return self._remove_partial(step)
        from spmdkit.checkpoint import orbax_backend

        self._barrier.give_up(error)
        orbax_backend.signal_folders_created()

    def _remove_partial(self, step: int) -> None:
        if self._staging is not None:
            self._staging.discard(step)
        if isinstance(self.directory, Remote):
            with contextlib.suppress(UnreachableError):  # the next start deletes it
                if self._is_main and self._is_ours() and step not in self.steps():
                    location.remove(self.directory / str(step))
            return
        folder = self.directory / f"{step}{records.TEMPORARY_MARK}"
        for _ in range(REMOVE_TRIES if self._is_main and self._is_ours() else 0):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                return
            time.sleep(0.05)  # threads of tensorstore may still be writing

    def finish_save(self) -> SaveResult:
        """Waits for the save in flight, if any; returns its result, the same on every process: a save that fails on one
        process fails on all."""
        if self._pending is None or self._draft is None:
            return SaveResult()
        step, why = self._draft.step, ""
        try:
            self._join()
        except CheckpointWriteError as error:
            why = str(error)
        ended = self._barrier.agreed_result(SaveResult(why, step in self._committed))
        if ended.committed:
            self.unfinished_step = None
        elif self.saved_step == step:
            self.saved_step = 0
        if ended.why and self._num_processes > 1:
            self._remove_partial(step)
        return ended

    def is_saving(self) -> bool:
        """Returns whether a save is being written."""
        return self._pending is not None and not self._pending.done()

    def wait_without_raising(self) -> None:
        """Waits for the save in flight; its error is raised by the next call that can raise."""
        if self._pending is not None:
            self._pending.exception()

    def new_commits(self) -> list[int]:
        """Returns the steps committed since the last `new_commits` or `wait`, without waiting or raising."""
        first, self._num_reported = self._num_reported, len(self._committed)
        return self._committed[first : self._num_reported]

    def wait(self) -> list[int]:
        """Waits for the save in the background; returns the same as `new_commits`.

        Raises:
            CheckpointWriteError: the save failed. Raised once.
        """
        self._join()
        return self.new_commits()

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        while pending is not None and not pending.done():
            waits = self._barrier.is_waiting  # the reported phase changes with it
            with phase.waiting("a save of all processes") if waits else contextlib.nullcontext():
                while self._barrier.is_waiting == waits and not futures.wait([pending], SAVE_POLL_S).done:
                    pass
        if pending is not None:
            pending.result()

    def close(self) -> list[int]:
        """Waits like `wait`, then stops the background threads; does nothing after `abandon`. A closed `Checkpoints` is
        still readable."""
        if self._is_abandoned:
            return []
        try:
            return self.wait()
        finally:
            self._background.shutdown()
            checkpointer, self._checkpointer = self._checkpointer, None
            if checkpointer is not None:
                from spmdkit.checkpoint import orbax_backend

                orbax_backend.close(checkpointer)
            if self._staging is not None:
                self._staging.close()

    def abandon(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for the save in flight and disables further saves. Never raises."""
        self._is_abandoned = True
        pending, self._pending = self._pending, None
        if pending is not None:
            with contextlib.suppress(Exception):
                pending.exception(timeout_s)
        self._background.shutdown(wait=False, cancel_futures=True)
        self._checkpointer = None

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, because training repeats these steps. Call it on process 0.

        Raises:
            CheckpointWriteError: a checkpoint cannot be deleted.
        """
        self._join()
        for newer in [s for s in self.steps() if s > step] if self._is_main else []:
            try:
                delete_step(self.directory, newer, even_if_held=True)
            except OSError as error:
                raise CheckpointWriteError(
                    f"rollback to step {step}: step {newer} could not be deleted from {self.directory} "
                    f"({records.first_line(error)}). A restart would restore it as the newest. Delete it by hand."
                ) from error

    def read_record(self, step: int) -> dict[str, Any]:
        """Returns the user record of a step."""
        return records.read_record(self.directory, step).user

    def read_tree(self, step: int) -> state_dict.LeafTable:
        """Returns `{path: (shape, dtype name)}` of a step."""
        return records.read_record(self.directory, step).leaves

    def restore(
        self, step: int, abstract_state: Any, optional: str | tuple[str, ...] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """Returns (state, the user record) of a step.

        Args:
            optional: path prefixes of leaves that may be in the checkpoint but not in the request; they are not read.

        Layout: each leaf is restored with the sharding of its jax.ShapeDtypeStruct in `abstract_state`, independent of
        the mesh, memory kind and number of processes that wrote it.

        Raises:
            CheckpointError: the step does not exist, or its model differs (paths, shapes or dtypes).
            DamagedError: the files differ from those written.
        """
        self._join()
        with self._readable(step) as directory:
            restored = checkpoint_restore.restore(self._orbax(), directory, step, abstract_state, optional)
        self._restored = step
        return restored

    def _readable(self, step: int) -> contextlib.AbstractContextManager[Location]:
        if self._staging is not None and step in self.steps():  # otherwise the error is raised when the record is read
            return location.local_copy(self.directory, step, self._staging.folder)
        return contextlib.nullcontext(self.directory)


def refusal_reason(directory: Location, written: Location, step: int, num_bytes: int) -> str:
    """Returns why a save cannot start, or an empty string.

    Args:
        written: the folder that orbax writes the step to: `directory`, or a local staging folder.
        num_bytes: total size of all arrays.
    """
    folder = directory / str(step)
    try:
        # Files that threads of a failed save wrote while it was being deleted.
        is_taken = location.exists(folder) and not (isinstance(folder, Remote) and remove_uncommitted(folder))
    except UnreachableError as error:
        return f"saving step {step}: {error}"
    if is_taken:
        is_committed = step in records.committed_steps(directory)
        what = "is already saved" if is_committed else f"has no {records.RECORD_FILE}, so it is not ours"
        return (
            f"saving step {step} to {folder}: the folder exists and {what}. A committed step is never overwritten. "
            f"Delete or rename {folder}."
        )
    if isinstance(written, Remote):
        return ""
    try:
        disk = os.statvfs(written)
    except OSError as error:
        return (
            f"saving step {step} to {folder}: {written} cannot be used ({records.first_line(error)}). "
            "It must exist until the run ends. Restore it and start again."
        )
    free, needed = disk.f_bavail * disk.f_frsize, num_bytes + FREE_MARGIN_BYTES
    if free >= needed:
        return ""
    return (
        f"saving step {step} to {folder} needs about {format_bytes(needed)}, {format_bytes(free)} are free. A save "
        "that would fill the disk is not started; earlier checkpoints are intact. Free some space, lower "
        "checkpoint.keep, or set run_dir to a folder on another disk."
    )


def save_failed(directory: Location, step: int, error: BaseException) -> CheckpointWriteError:
    """Returns the error for a save that was started and then failed."""
    have = "those before"
    with contextlib.suppress(UnreachableError):
        have = ", ".join(map(str, records.committed_steps(directory))) or "none yet"
    return CheckpointWriteError(
        f"saving step {step} to {directory / str(step)} failed ({records.first_line(error)}). "
        f"A checkpoint counts only when it is committed; intact are {have}. "
        "Fix the cause and start the same command again."
    )
