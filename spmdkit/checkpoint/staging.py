"""Staging for buckets that orbax does not write to: a step is written to a local folder and uploaded, the marker last.
A step is downloaded before it is read.

orbax 0.12 rejects `s3://`. The bucket contains the same files that orbax would write. The local folder needs space for
one step.

The processes do not need a shared folder. Each process uploads its part. Then process 0 downloads the indexes of the
other parts (kilobytes), merges one step as orbax does in a shared folder, and uploads its part, the index, the record
and the marker. For a restore each process downloads the complete step.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax

from spmdkit.checkpoint import location
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.save_barrier import SaveBarrier
from spmdkit.errors import CheckpointWriteError, ConfigError
from spmdkit.foundation import files

STAGED = ("s3",)
"""URL schemes that orbax does not write to."""


def staging_of(directory: location.Location, folder: Path | None) -> Staging | None:
    """Returns the staging of the steps of `directory`; None if orbax writes to it directly."""
    is_staged = isinstance(directory, Remote) and directory.scheme in STAGED
    return Staging(directory, folder) if is_staged else None  # type: ignore[arg-type]


class Staging:
    """The local folder of one process, and its bucket. Files of a killed run are deleted from the folder."""

    def __init__(self, directory: Remote, folder: Path | None):
        self._directory, self.folder = directory, folder
        self._temporary: Path | None = None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=files.FOLDER_MODE, parents=True)

    @property
    def written(self) -> Path:
        """The folder that orbax writes to, created on first use."""
        if self.folder is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="spmdkit-stage-"))
        folder = (self.folder or self._temporary or Path()) / "written"
        folder.mkdir(mode=files.FOLDER_MODE, exist_ok=True)
        return folder

    def commit(self, step: int, is_owner: Callable[[], bool], uploaded: Collection[str] = ()) -> None:
        """Uploads a step from the local folder, with the record and then the marker last, and deletes the local copy.

        Args:
            uploaded: files of the step that are already in the bucket. If empty, existing files of the step in the
                bucket are deleted first.

        Raises:
            ConfigError: another run owns the bucket's folder now.
            Unreachable: the bucket cannot be written.
        """
        folder, remote = self.written / str(step), self._directory / str(step)
        if not uploaded and remote.exists():
            location.remove(remote)
        names = location.sizes(folder).keys() - {location.MARKER} - set(uploaded)
        location.upload(folder, remote, sorted(names, key=lambda name: (name == records.RECORD_FILE, name)))
        self._check(is_owner)
        (remote / location.MARKER).write_bytes(b"committed by spmdkit")
        shutil.rmtree(folder)

    def commit_parts(
        self,
        step: int,
        is_owner: Callable[[], bool],
        barrier: SaveBarrier,
        add_record: Callable[[Path, Mapping[str, int]], None],
    ) -> None:
        """Commits a step from the parts in the folders of the processes; returns when it is committed.

        Args:
            add_record: writes the record of a step. Arguments: the folder, and the sizes of the files that are in the
                bucket only or in both.

        Raises:
            CheckpointWriteError: the files in the bucket differ from those that the other processes uploaded.
            ConfigError, Unreachable: as `commit`.
            RuntimeError: another process failed or did not arrive in time.
        """
        folder, remote = self.written / str(step), self._directory / str(step)
        me = jax.process_index()
        if me:
            part = {name: size for name, size in location.sizes(folder).items() if _is_part(name, me)}
            self._check(is_owner)
            location.upload(folder, remote, sorted(part))
            barrier.gather(_part_digest(folder, part))
            shutil.rmtree(folder)
        else:
            uploaded = self._fetch_indexes(step, barrier.gather(""))
            from spmdkit.checkpoint import orbax_backend

            orbax_backend.merge_parts(folder)
            add_record(folder, uploaded)
            self.commit(step, is_owner, uploaded)
        barrier.wait()

    def _fetch_indexes(self, step: int, digests: Sequence[str]) -> dict[str, int]:
        """Downloads the indexes and the small files of the other parts from the bucket: those with a digest in the
        record. Returns `{path: bytes}` of these parts."""
        folder, remote = self.written / str(step), self._directory / str(step)
        remote_sizes, uploaded = remote.sizes(), dict[str, int]()
        for process, digest in enumerate(digests, 1):
            part = {name: size for name, size in remote_sizes.items() if _is_part(name, process)}
            for name, size in part.items():
                is_index = name.endswith("/manifest.ocdbt") or records.INDEX_FOLDER in name.split("/")
                if is_index or size <= records.SMALL_FILE_BYTES:
                    (remote / name).download(folder / name)
            if _part_digest(folder, part) != digest:
                raise CheckpointWriteError(
                    f"the files of process {process} in {remote} are not those that it has uploaded. Another run "
                    "writes there. One run at a time may write to a folder of a bucket: end the other, or set "
                    "checkpoint.directory to another folder."
                )
            uploaded |= part
        return uploaded

    def _check(self, is_owner: Callable[[], bool]) -> None:
        if not is_owner():
            raise ConfigError(f"{self._directory} belongs to another run now, so nothing is committed to it.")

    def discard(self, step: int) -> None:
        """Deletes the local files of a failed save."""
        for name in (str(step), f"{step}{records.TEMPORARY_MARK}"):
            shutil.rmtree(self.written / name, ignore_errors=True)

    def close(self) -> None:
        """Deletes the folder if it is a temporary one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def _is_part(name: str, process: int) -> bool:
    """Returns whether only this process writes a file of a step (`name`: its relative path). Other files are written by
    every process, or by all together."""
    return not {f"ocdbt.process_{process}", f"process_{process}"}.isdisjoint(name.split("/"))


def _part_digest(folder: Path, sizes: Mapping[str, int]) -> str:
    """Returns a digest of the files of a part: their names, their sizes and the contents of small files, which are in
    `folder`."""
    content = [sorted(sizes.items()), sorted(records.digest_files(folder, sizes).items())]
    return files.digest(json.dumps(content).encode())
