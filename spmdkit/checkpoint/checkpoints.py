"""Checkpoints: the checkpoints of one run, saved while training goes on, restored onto any mesh.

`save` blocks while the arrays are copied to the host, like orbax alone; writing, the commit and the deletion of old
steps happen in a background thread. One save is in flight at a time: the next waits for it.

Every process of a run makes one of these and calls `save` and `restore` at the same steps. Process 0 writes the
record, commits, and deletes.

A directory in a bucket is written by orbax itself where it can (gs://), otherwise by way of a local folder of each
process (staging.py); its last object commits a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdkit.checkpoint import location, retention, save_errors, state_dict
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint import restore as checkpoint_restore
from spmdkit.checkpoint.location import Place
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.save_barrier import Ended, Exchange, Meeting
from spmdkit.checkpoint.staging import staging_of
from spmdkit.errors import CheckpointWriteError, ConfigError, Unreachable
from spmdkit.foundation import files, phase
from spmdkit.foundation.timeouts import SAVE_POLL_S

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

DISCARD_TRIES = 40


class Checkpoints:
    """The checkpoints in one directory.

    Args:
        directory: holds `<step>/` folders; made when missing. What a killed run left unfinished in it is removed, so
            the caller holds the run's lock.
        keep: how many of the newest steps stay.
        keep_every: steps that this divides stay too.
        best: (metric, "min" or "max"): the best step by that metric stays too.
        timeout_s: how long a save may take to be written by all processes.
        is_main, num_processes: who this process is.
        cluster: with several processes, so that all learn that process 0 refuses a save, and how each one ended.
        is_ours: whether the directory is still this run's; where it is not, nothing is committed or removed.
        stage: a local folder of this process, for steps on their way to or from a bucket; default: in the system's
            temporary one.
        beside: local files that are copied beside the steps of a bucket, as they are at each commit.
        clock: seconds since the epoch, for the record.
    """

    def __init__(
        self,
        directory: Place | str,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        best: tuple[str, retention.Mode] | None = None,
        timeout_s: float = 600,
        is_main: bool = True,
        num_processes: int = 1,
        cluster: Exchange | None = None,
        is_ours: Callable[[], bool] = lambda: True,
        stage: Path | None = None,
        beside: Sequence[Path] = (),
        clock: Callable[[], float] = time.time,
    ):
        if keep < 1:
            raise ConfigError(f"checkpoint.keep is {keep}. The newest checkpoint always stays. Set keep: 1 or more.")
        if best is not None and best[1] not in ("min", "max"):
            raise ConfigError(f"checkpoint.best.mode is {best[1]!r}. It must be 'min' or 'max'. Try mode: min.")
        self.directory: Place = location.of(directory)
        self._keep, self._keep_every, self._best, self._timeout_s = keep, keep_every, best, timeout_s
        self._is_main, self._num_processes = is_main, num_processes
        self._is_ours, self._clock, self._beside = is_ours, clock, tuple(beside)
        self._staging = staging_of(self.directory, stage)
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._draft: records.Record | None = None
        self._form: state_dict.Form | None = None
        self._committed: list[int] = []
        self._last_committed: int | None = None
        self._meeting = Meeting(cluster, num_processes, is_main, timeout_s)
        if is_main:
            try:
                if isinstance(self.directory, Path):
                    self.directory.mkdir(mode=files.FOLDER_MODE, parents=True, exist_ok=True)
                retention.remove_unfinished(self.directory)
            except OSError as error:
                raise ConfigError(
                    f"checkpoints go to {self.directory}, which cannot be used ({records.first_line(error)}). "
                    "It must be a folder that this process may write to. Set run_dir to one."
                ) from error

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending, as the disk has them now."""
        return records.committed_steps(self.directory)

    @property
    def _written(self) -> Place:
        """Where orbax writes the steps."""
        return self.directory if self._staging is None else self._staging.written

    def last_known(self) -> int | None:
        """Returns the newest committed step without waiting for a network: of a bucket the newest that this process has
        committed."""
        return self._last_committed if isinstance(self.directory, Remote) else self.latest()

    def latest(self) -> int | None:
        """Returns the newest committed step. With several processes, ask on process 0 and tell the others."""
        steps = self.steps()
        return steps[-1] if steps else None

    def save(
        self, step: int, state: Any, record: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Starts saving `state` as `step`; returns when the arrays may be donated. `check` or `wait` tell the rest.

        Args:
            record: JSON data that `restore` gives back: the config, versions, the seed, the data position.
            metrics: what `best` chooses by.

        Raises:
            CheckpointWriteError: an earlier save failed (this one is not started), the step is taken, the disk is too
                full, or orbax refused.
            ConfigError: a leaf cannot be saved (see `state_dict.leaf_table`).
        """
        self._join()
        form, arrays = state_dict.form_of(state, self._form)
        self._form = form
        self._meeting.begin(self._objection(step, form.num_bytes))
        # Leaves without elements live in the record only: orbax does not save them.
        flat = {path: array for path, array in zip(form.table, arrays, strict=True) if array.size}
        self._draft = records.Record(
            step=step,
            time=self._clock(),
            num_processes=self._num_processes,
            bytes=form.num_bytes,
            metrics=records.finite_metrics(metrics or {}),
            leaves=form.table,
            files={},
            user=json.loads(json.dumps(record, allow_nan=False)),
            best=self._best,
        )
        from spmdkit.checkpoint import orbax_backend

        orbax_backend.keep_names(
            path.replace("/", ".") for path in flat
        )  # of each array orbax makes a `Path` at each save
        try:
            orbax_backend.start_save(self._orbax(), self._written / str(step), state_dict.nest(flat))
        except Exception as error:
            self._give_up(step, error)
            failed = self._write_error(step, error)
            failed.__cause__ = error
            if self._num_processes == 1:
                raise failed from error
            self._pending = Future()  # the others are writing: all hear of it when they ask how it ended
            self._pending.set_exception(failed)
            return
        self._pending = self._background.submit(self._finish, step)

    def _objection(self, step: int, num_bytes: int) -> str:
        """Returns why process 0 will not start this save, or an empty string."""
        if not self._is_main:
            return ""
        return save_errors.objection(self.directory, self._written, step, num_bytes)

    def _orbax(self) -> ocp.AsyncCheckpointer:
        if self._checkpointer is None:
            from spmdkit.checkpoint import orbax_backend

            self._checkpointer = orbax_backend.open_checkpointer(
                self._num_processes, self._timeout_s, self._meeting.barrier, self._before_commit, self._is_apart
            )
        return self._checkpointer

    @property
    def _is_apart(self) -> bool:
        """Whether each of several processes writes its part of a step to a folder of its own."""
        return self._staging is not None and self._num_processes > 1

    def _before_commit(self) -> None:
        """What comes in the background, on process 0, before orbax's rename. Of parts that lie apart the record comes
        later."""
        assert self._draft is not None
        if not self._is_apart:
            self._add_record(self._unfinished(self._draft.step), {})

    def _add_record(self, folder: Place, elsewhere: Mapping[str, int]) -> None:
        """Writes record.json beside the finished arrays; `elsewhere`: bytes of files of the step that may not be in
        `folder`, small ones are."""
        assert self._draft is not None
        if not self._is_ours():
            raise ConfigError(f"{self.directory} belongs to another run by now: nothing is committed to it.")
        sizes = {**elsewhere, **records.list_files(folder)}
        digests = records.digest_small(folder, sizes)
        records.write_record(folder, dataclasses.replace(self._draft, files=sizes, digests=digests))
        if isinstance(self.directory, Remote):
            for path in filter(Path.exists, self._beside):
                whole_lines = path.read_bytes().rpartition(b"\n")[0] + b"\n"
                (self.directory / location.KEPT_BESIDE / path.name).write_bytes(whole_lines)

    def _unfinished(self, step: int) -> Place:
        """Returns the folder of a step that is being written."""
        mark = "" if isinstance(self._written, Remote) else records.TEMPORARY_MARK
        return self._written / f"{step}{mark}"

    def _finish(self, step: int) -> None:
        """Waits for the commit and deletes what is not kept. In the background, on every process."""
        try:
            self._orbax().wait_until_finished()
            if self._is_main and isinstance(self.directory, Path):
                files.tighten(self.directory / str(step))
                files.sync_folder(self.directory)
            if self._staging is not None and self._is_apart:
                self._staging.commit_together(step, self._is_ours, self._meeting, self._add_record)
            elif self._staging is not None:
                self._staging.commit(step, self._is_ours)
        except Exception as error:
            self._give_up(step, error)
            raise self._write_error(step, error) from error
        self._committed.append(step)
        self._last_committed = step
        if self._is_main:
            retention.delete_old(self.directory, step, self._keep, self._keep_every, self._best)

    def _give_up(self, step: int, error: BaseException) -> None:
        """Lets nobody wait for this process's part of a save, and removes what was written of it: of several processes
        `settle` does, when all have ended.

        A folder that goes away while another process writes into it can leave that one in tensorstore for ever (0.1.86:
        one in eight, 2026-11-24).
        """
        if self._num_processes == 1:
            return self._discard(step)
        from spmdkit.checkpoint import orbax_backend

        self._meeting.give_up(error)
        orbax_backend.let_others_write()

    def _discard(self, step: int) -> None:
        """Removes what a failed save wrote: on a full disk the room is needed."""
        if self._staging is not None:
            self._staging.discard(step)
        if isinstance(self.directory, Remote):
            with contextlib.suppress(Unreachable):  # otherwise the next start removes it
                if self._is_main and self._is_ours() and step not in self.steps():
                    location.remove(self.directory / str(step))
            return
        folder = self.directory / f"{step}{records.TEMPORARY_MARK}"
        for _ in range(DISCARD_TRIES if self._is_main and self._is_ours() else 0):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                return
            time.sleep(0.05)  # tensorstore's own threads may still write what had begun

    def _write_error(self, step: int, error: BaseException) -> CheckpointWriteError:
        return save_errors.not_saved(self.directory, step, error)

    def settle(self) -> Ended:
        """Waits for the save in flight, if there is one; returns on every process how it ended, for all: one that
        failed has failed everywhere."""
        if self._pending is None:
            return Ended()
        step, why = self._draft.step if self._draft else None, ""
        try:
            self._join()
        except CheckpointWriteError as error:
            why = str(error)
        ended = self._meeting.agreed_result(Ended(why, self._last_committed == step))
        if ended.why and step is not None and self._num_processes > 1:
            self._discard(step)
        return ended

    def is_saving(self) -> bool:
        """Returns whether a save is being written."""
        return self._pending is not None and not self._pending.done()

    def wait_quietly(self) -> None:
        """Waits until nothing is being written; how it ended is told by the next call that tells."""
        if self._pending is not None:
            self._pending.exception()

    def commits(self) -> list[int]:
        """Returns the steps committed since the last call of this, `check` or `wait`; never waits or raises."""
        return self._take_committed()

    def check(self) -> list[int]:
        """Returns the steps committed since the last call of `check` or `wait`, without waiting.

        Raises:
            CheckpointWriteError: the save in the background failed. Raised once.
        """
        if self._pending is not None and self._pending.done():
            self._join()
        return self._take_committed()

    def wait(self) -> list[int]:
        """Waits for the save in the background; returns and raises like `check`."""
        self._join()
        return self._take_committed()

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        while pending is not None and not pending.done():
            with phase.waiting("a save of all") if self._meeting.waits else contextlib.nullcontext():
                self._look_on(pending, self._meeting.waits)
        if pending is not None:
            pending.result()

    def _look_on(self, pending: Future[None], waits: bool) -> None:
        """Returns when the save has ended, or this process no longer waits for the others, or begins to: whoever
        watches sees who holds up whom."""
        while self._meeting.waits == waits and not futures.wait([pending], SAVE_POLL_S).done:
            pass

    def _take_committed(self) -> list[int]:
        done = self._committed[:]
        del self._committed[: len(done)]
        return done

    def close(self) -> list[int]:
        """Waits like `wait`, then ends the background threads. A closed `Checkpoints` can still be read."""
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

    def abandon(self, patience_s: float) -> None:
        """Returns when the save in flight has ended, for good or bad, after `patience_s` at most; nothing is saved any
        more. Never raises."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with contextlib.suppress(Exception):
                pending.exception(patience_s)
        self._background.shutdown(wait=False, cancel_futures=True)
        self._checkpointer = None

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`: training has gone back to it, and those steps come again. On process 0.

        Raises:
            CheckpointWriteError: one cannot be deleted.
        """
        self._join()
        for newer in [s for s in self.steps() if s > step] if self._is_main else []:
            try:
                retention.delete_step(self.directory, newer, even_if_held=True)
            except OSError as error:
                raise CheckpointWriteError(
                    f"going back to step {step}: step {newer} could not be deleted from {self.directory} ({records.first_line(error)}). "
                    "It would be taken for the newest. Delete it by hand."
                ) from error

    def read_record(self, step: int) -> dict[str, Any]:
        """Returns the caller's record of a step, as given to `save`."""
        return records.read_record(self.directory, step).user

    def read_tree(self, step: int) -> state_dict.LeafTable:
        """Returns `{path: (shape, dtype name)}` of a step."""
        return records.read_record(self.directory, step).leaves

    def restore(
        self, step: int, abstract_state: Any, optional: str | tuple[str, ...] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """Returns (state, the caller's record) of a step.

        Args:
            optional: what begins the paths of leaves that are left unread where they are saved and not asked for.

        Layout: each leaf comes back on the sharding of its jax.ShapeDtypeStruct in `abstract_state`, whatever mesh,
        memory kind or number of processes wrote it.

        Raises:
            CheckpointError: no such step; another model (paths, shapes or dtypes differ).
            DamagedError: it is not as it was written.
        """
        self._join()
        with self._readable(step) as directory:
            return checkpoint_restore.restore(self._orbax(), directory, step, abstract_state, optional)

    def _readable(self, step: int) -> contextlib.AbstractContextManager[Place]:
        """Returns the directory from which orbax reads a step."""
        if self._staging is not None and step in self.steps():  # otherwise whoever reads its record says so
            return location.fetched(self.directory, step, self._staging.folder)
        return contextlib.nullcontext(self.directory)
