"""A folder of a bucket, `gs://bucket/run` or `s3://bucket/run`: the subset of `pathlib.Path` that checkpoints need, on
fsspec's gcsfs and s3fs.

A bucket has no folders, no rename and no lock. Objects are written atomically, and a folder is a common prefix of
names. So the last object of a step commits it (`location.MARKER`, which orbax also writes), a deletion starts with that
object, and a move is a copy. Listings are not cached, because other processes write to the bucket.

The clients read credentials and endpoints (GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE, AWS_ENDPOINT_URL ...).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from spmdkit.errors import ConfigError, SpmdkitError, StoreDownError, UnreachableError
from spmdkit.foundation import redact
from spmdkit.foundation.files import NO_ROOM, not_written

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}
"""URL scheme -> the package that implements it."""


WRITTEN = "written"
DOWN = {"ConnectionError", "HTTPClientError", "ClientConnectionError", "TimeoutError", "Timeout", "RetryError"}
"""Classes of botocore, aiohttp, requests, google.api_core and Python for a store that does not respond."""
BUSY_CODES = {408, 429, 500, 502, 503, 504}
BUSY_ERRNOS = {errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO)}
"""HTTP codes and s3fs's error numbers of a store that is overloaded or out of service."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """A folder or an object: `url` without a trailing slash. Raises `UnreachableError` if access fails or is denied,
    and FileNotFoundError if the object does not exist."""

    url: str

    def __truediv__(self, name: str | PurePosixPath) -> Remote:
        return Remote(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def key(self) -> str:
        """The name without the scheme, in the form that the clients accept: `bucket/run/1`."""
        return self.url.partition("://")[2]

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0])

    def read_bytes(self) -> bytes:
        with _translate_errors(self, "read"):
            return bytes(_client(self.scheme).cat_file(self.key))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        with _translate_errors(self, WRITTEN):
            _client(self.scheme).pipe_file(self.key, content)

    def names(self) -> list[str]:
        """Returns the names in a folder; empty if the folder does not exist."""
        with _translate_errors(self, "listed"), contextlib.suppress(FileNotFoundError):
            listed = _client(self.scheme).ls(self.key, detail=False)
            return sorted({PurePosixPath(name).name for name in listed if name.rstrip("/") != self.key})
        return []

    def sizes(self) -> dict[str, int]:
        """Returns `{path below this folder: bytes}` of every object below it."""
        with _translate_errors(self, "listed"), contextlib.suppress(FileNotFoundError):
            listed = _client(self.scheme).find(self.key, detail=True)
            start = f"{self.key}/"
            return {
                name.removeprefix(start): int(info["size"]) for name, info in sorted(listed.items()) if name[-1] != "/"
            }
        return {}

    def exists(self) -> bool:
        """Returns whether an object with this name, or one below it, exists."""
        return bool(self.sizes())

    def remove(self, below: list[str]) -> None:
        """Deletes objects below this folder; missing objects are no error."""
        with _translate_errors(self, "removed"):
            for name in below:
                with contextlib.suppress(FileNotFoundError):
                    _client(self.scheme).rm_file(f"{self.key}/{name}")

    def copy(self, below: list[str], to: Remote) -> None:
        """Copies objects below this folder to another folder, within the storage service."""
        with _translate_errors(self, f"copied to {to}"):
            for name in below:
                _client(self.scheme).cp_file(f"{self.key}/{name}", f"{to.key}/{name}")

    def upload(self, path: Path) -> None:
        """Uploads a local file to this object."""
        with _translate_errors(self, WRITTEN):
            _client(self.scheme).put_file(str(path), self.key)

    def download(self, path: Path) -> None:
        """Downloads this object to a local file. Raises CheckpointWriteError if the disk is full."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with _translate_errors(self, "read"):
            try:
                _client(self.scheme).get_file(self.key, str(path))
            except OSError as error:
                if error.errno in NO_ROOM and error.errno != errno.EIO:  # s3fs has EIO for unknown errors
                    raise not_written(path, error) from error
                raise


@functools.cache
def _client(scheme: str) -> Any:
    """Returns the client for a scheme. The listings cache is off, also for the client that orbax creates."""
    try:
        import fsspec

        if scheme == "gs":
            for name in ("gs", "gcs"):
                fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
        logging.getLogger("gcsfs").setLevel(logging.ERROR)  # hides a message about the bucket type at each call
        # It prints the traceback of a request that failed permanently, and also raises it.
        logging.getLogger("gcsfs").addFilter(lambda record: record.filename != "retry.py")
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(
            f"checkpoints in {scheme}:// need the package {SCHEMES[scheme]}, which is not installed ({error}). "
            "It is an extra, for who has no shared disk. Run `pip install 'spmdkit[storage]'`."
        ) from None


@contextlib.contextmanager
def _translate_errors(where: Remote, done: str) -> Iterator[None]:
    """Converts exceptions of a client or its transport to `UnreachableError`, without secrets of the environment."""
    try:
        yield
    except (SpmdkitError, MemoryError):
        raise
    except Exception as error:
        of_local_file = isinstance(error, OSError) and error.filename is not None
        if of_local_file or (isinstance(error, FileNotFoundError) and done != WRITTEN):
            raise
        text = " ".join(redact.redact_text(str(error)).split())[:300]
        found = f"{where} could not be {done}: {type(error).__name__}: {text}."
        if _is_down(error):
            raise StoreDownError(
                f"{found} checkpoint.directory is a bucket that responds to all processes. Start the same command "
                "again when it does; launchers do so. What was committed is intact."
            ) from None
        raise UnreachableError(
            f"{found} checkpoint.directory is a bucket that all processes reach with credentials of their client "
            f"({SCHEMES[where.scheme]}). Check the name and the credentials (`gcloud auth application-default login`, "
            "or AWS_PROFILE, AWS_ENDPOINT_URL), and start the same command again: what was committed is intact."
        ) from None


def _is_down(error: Exception) -> bool:
    """Returns whether a store does not respond or is overloaded. Otherwise a name or a credential is wrong."""
    is_busy = isinstance(error, OSError) and error.errno in BUSY_ERRNOS
    return (
        is_busy
        or getattr(error, "code", None) in BUSY_CODES | set(map(str, BUSY_CODES))
        or not DOWN.isdisjoint(kind.__name__ for kind in type(error).__mro__)
    )
