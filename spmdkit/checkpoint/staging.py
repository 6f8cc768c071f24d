"""Steps on their way to a bucket that orbax does not write to: written to a local folder, uploaded, the marker last; fetched before they are read.

orbax 0.12 refuses `s3://` ("Checkpoint path should be absolute"). What lies in the bucket afterwards is what it would have written: a local reader of
orbax opens a copy of it. The local folder needs room for one step more than the memory holds.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from spmdkit import files
from spmdkit.checkpoint import place
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.bucket import Remote
from spmdkit.errors import ConfigError

STAGED = ("s3",)
"""Schemes that orbax does not write to."""


def staging_of(directory: place.Place, folder: Path | None) -> Staging | None:
    """Returns how the steps of `directory` are staged, None where orbax writes to it itself."""
    is_staged = isinstance(directory, Remote) and directory.scheme in STAGED
    return Staging(directory, folder) if is_staged else None  # type: ignore[arg-type]


def refuse_several(directory: Remote, num_processes: int) -> None:
    """Refuses to save a step of several processes by way of local folders: orbax puts it together in one folder that all of them see.

    Raises:
        ConfigError: there are several processes, and orbax does not write to `directory` itself.
    """
    if num_processes > 1 and directory.scheme in STAGED:
        raise ConfigError(
            f"checkpoint.directory is {directory}, and {num_processes} processes train. orbax does not write to {directory.scheme}:// itself, and puts "
            "what several processes write together in one folder that all of them see. Set it to a gs:// folder, which all write to; or leave it out "
            "and set run_dir to a folder on a disk that all processes share; or train with one process."
        )


class Staging:
    """The local folder of one process, and the bucket beyond it. What a killed run left in the folder is removed."""

    def __init__(self, directory: Remote, folder: Path | None):
        self._directory, self.folder = directory, folder
        self._temporary: Path | None = None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=files.FOLDER_MODE, parents=True)

    @property
    def written(self) -> Path:
        """The folder that orbax writes to, made when it is first asked for."""
        if self.folder is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="spmdkit-stage-"))
        folder = (self.folder or self._temporary or Path()) / "written"
        folder.mkdir(mode=files.FOLDER_MODE, exist_ok=True)
        return folder

    def commit(self, step: int, is_ours: Callable[[], bool]) -> None:
        """Uploads a step that is whole in the folder, its record and then the marker last, and removes it here.

        Raises:
            ConfigError: the bucket's folder belongs to another run by now.
            Unreachable: it could not be written.
        """
        folder = self.written / str(step)
        place.upload(folder, self._directory / str(step), last=(records.RECORD_FILE,), without=(place.MARKER,))
        if not is_ours():
            raise ConfigError(f"{self._directory} belongs to another run by now: nothing is committed to it.")
        (self._directory / str(step) / place.MARKER).write_bytes(b"committed by spmdkit")
        shutil.rmtree(folder)

    def discard(self, step: int) -> None:
        """Removes what is left here of a save that failed."""
        for name in (str(step), f"{step}{records.TEMPORARY_MARK}"):
            shutil.rmtree(self.written / name, ignore_errors=True)

    def close(self) -> None:
        """Removes the folder where it was a temporary one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
