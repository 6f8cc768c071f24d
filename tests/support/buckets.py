"""Buckets for tests: an in-memory bucket that can fail at any operation, and local servers of both protocols."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import MutableMapping
from pathlib import Path

PACKAGES = ("gcsfs", "s3fs", "moto", "gcp_storage_emulator")
BUCKET = "bucket-one"

EMULATOR = """
from http.server import HTTPServer
from gcp_storage_emulator.__main__ import main
HTTPServer.request_queue_size = 128  # 5 otherwise: fewer than a save has open
main()
"""


class CutOff(BaseException):
    """Simulates a kill: spmdkit code does not catch it."""


class InMemory:
    """The client interface that checkpoint/object_store.py uses. `left`: number of remaining changes; the next one
    raises `CutOff`."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.left: int | None = None
        self.changes = 0

    def _change(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise CutOff
            self.left -= 1
        self.changes += 1

    def cat_file(self, key):
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]

    def pipe_file(self, key, content):
        self._change()
        self.objects[key] = bytes(content)

    def ls(self, key, detail):
        found = sorted({f"{key}/{name[len(key) + 1 :].split('/')[0]}" for name in self.find(key, False)})
        if not found:
            raise FileNotFoundError(key)
        return found

    def find(self, key, detail):
        return {name: {"size": len(x)} for name, x in self.objects.items() if name.startswith(key + "/")}

    def rm_file(self, key):
        self._change()
        if self.objects.pop(key, None) is None:
            raise FileNotFoundError(key)

    def cp_file(self, key, to):
        self._change()
        self.objects[to] = self.objects[key]

    def put_file(self, path, key):
        self.pipe_file(key, Path(path).read_bytes())

    def get_file(self, key, path):
        Path(path).write_bytes(self.cat_file(key))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class InFolder(MutableMapping):
    """The objects of an `InMemory` that several processes share: each is a file in one folder, written atomically."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / urllib.parse.quote(key, safe="")

    def __getitem__(self, key):
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key, content):
        beside = self._path(f"{key}.{os.getpid()}~")
        beside.write_bytes(content)
        beside.rename(self._path(key))

    def __delitem__(self, key):
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __iter__(self):
        return iter([urllib.parse.unquote(name) for name in os.listdir(self.folder) if not name.endswith("~")])

    def __len__(self):
        return len(list(iter(self)))


def shared_client(folder: Path) -> InMemory:
    client = InMemory()
    client.objects = InFolder(folder)
    return client


@contextlib.contextmanager
def server(scheme: str):
    """Yields the environment variables by which clients of a scheme reach a local server with an empty BUCKET."""
    port, home = free_port(), Path(sys.executable).parent
    url = f"http://127.0.0.1:{port}"
    if scheme == "gs":
        command = [
            sys.executable,
            "-c",
            EMULATOR,
            "start",
            "--host=127.0.0.1",
            f"--port={port}",
            "--in-memory",
            f"--default-bucket={BUCKET}",
        ]
        env = {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",  # otherwise tensorstore asks the metadata server of a cloud
            "GCSFS_DEFAULT_PROJECT": "x",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # queries another service for the type of a bucket
        }
    else:
        command = [home / "moto_server", "-H", "127.0.0.1", "-p", str(port)]
        env = {
            "AWS_ACCESS_KEY_ID": "not-a-real-id",
            "AWS_SECRET_ACCESS_KEY": "canary-of-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | env)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline and process.poll() is None, "the server did not start"
            time.sleep(0.05)
        if scheme == "s3":
            import boto3

            keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
            boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket=BUCKET)
        yield env
    finally:
        process.kill()
        process.wait(10)
