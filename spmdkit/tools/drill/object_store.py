"""`ObjectStore`: a local S3 server for the fault `object-store`. While it is down its port is closed.

The server (moto) runs this module in a separate process, and reads `down` and `up` from standard input.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spmdkit.checkpoint import location
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.record import committed_steps
from spmdkit.errors import ConfigError
from spmdkit.launch.process import start
from spmdkit.tools.drill.corrupt import newest

BUCKET = "drill"
PACKAGES = ("moto", "flask", "s3fs")


def missing_packages() -> str:
    """Returns why this machine cannot run the server; empty if it can."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"a local object store needs {' and '.join(missing)} (pip install 'moto[server]' s3fs)" if missing else ""


class ObjectStore:
    """The server of one drill. `folder` returns a location in it."""

    def __init__(self, server: subprocess.Popen[Any]):
        self._server = server

    def folder(self, name: str) -> Remote:
        return Remote(f"s3://{BUCKET}/{name}")

    def take_down(self) -> str:
        """Closes the port; returns why that failed, empty if it did not."""
        return self._write("down")

    def restore(self) -> None:
        """Opens the port again."""
        self._write("up")

    def _write(self, word: str) -> str:
        assert self._server.stdin is not None
        try:
            os.write(self._server.stdin.fileno(), f"{word}\n".encode())
        except OSError:
            return "the server of the object store has exited"
        return ""

    def upload(self, checkpoints: Path, name: str) -> None:
        """Copies the steps of a local folder to `name`."""
        to = self.folder(name)
        for step in committed_steps(checkpoints):
            folder = checkpoints / str(step)
            location.upload(folder, to / str(step), sorted(location.sizes(folder)))
            (to / str(step) / location.MARKER).write_bytes(b"")

    def download_newest(self, name: str, run_dir: Path) -> None:
        """Copies the newest step of `name` to the local checkpoints of a run."""
        source = self.folder(name)
        step = str(newest(source))
        for file in (source / step).sizes():
            (source / step / file).download(run_dir / "checkpoints" / step / file)


@contextlib.contextmanager
def object_store_for(kinds: Iterable[str]) -> Iterator[ObjectStore | None]:
    """Yields a local store, with the variables of its clients set; None if no fault is of the kind `object-store`.

    Raises:
        ConfigError: this machine cannot run the server.
    """
    if "object-store" not in kinds:
        yield None
        return
    if why := missing_packages():
        raise ConfigError(f"--fault object-store: {why}. Install them, or leave this fault out.")
    before, pipe = dict(os.environ), subprocess.PIPE
    command = [sys.executable, "-m", __name__]
    with start(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().decode().strip()
            if not port:
                raise ConfigError("--fault object-store: the local server (moto) did not start. Run `moto_server`.")
            os.environ.update(_variables(port))
            yield ObjectStore(server)
        finally:
            server.kill()
            os.environ.clear()
            os.environ.update(before)


def _variables(port: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "drill",
        "AWS_SECRET_ACCESS_KEY": "drill",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }


def main() -> None:
    """Runs the server until standard input closes. Prints its port."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ.update(_variables(str(port)))
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    print(port, flush=True)
    is_up = True
    for line in sys.stdin:
        if is_up != (line.strip() == "up"):
            is_up = not is_up
            if not is_up:
                server.stop()
            else:
                server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
                server.start()


if __name__ == "__main__":
    main()
