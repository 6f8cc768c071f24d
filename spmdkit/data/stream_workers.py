"""`data.workers`: processes that read shards of one process of the job.

A worker is a new interpreter, so that no thread or device of JAX is forked, and it computes on the CPU platform. It
receives the stream and the positions of its shards by cloudpickle, and then sends batch after batch:

    8 bytes   the length of the header
    header    a pickle of (error | None, the number of rows of each shard, positions)
    rows      the bytes of each leaf, which the parent receives in the memory of its batch

The rows and the positions are those of `OpenShards` in this process. A worker reads one batch ahead. It ends when its
socket closes, so also when the parent is killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np

from spmdkit.data.open_shards import CheckedStream, OpenShards
from spmdkit.data.schedule import StreamSchedule
from spmdkit.errors import ConfigError, SpmdkitError, UserCodeError
from spmdkit.foundation.user_code import shown_line

LENGTH = struct.Struct("<Q")


class Worker:
    """A worker process, with the methods of `OpenShards`."""

    def __init__(self, what: str, shards: Sequence[int]):
        self._what, self.shards = what, shards
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "JAX_PLATFORMS": "cpu",
                    "JAX_ENABLE_X64": str(jax.config.read("jax_enable_x64")),
                },
                process_group=0,
            )

    def send(self, arguments: bytes) -> None:
        """Sends the arguments of `OpenShards`."""
        try:
            self._socket.sendall(LENGTH.pack(len(arguments)) + arguments)
        except OSError:
            raise self._ended() from None

    def read(self, out: list[np.ndarray]) -> tuple[list[int], dict[str, Any]]:
        """Receives the rows of the next batch in `out`. Returns the number of rows of each shard, and the positions."""
        try:
            error, counts, positions = pickle.loads(receive(self._socket))
            if error is None:
                for leaf in out:
                    receive_into(self._socket, leaf.reshape(-1).view(np.uint8).data)
                return counts, positions
        except OSError:
            raise self._ended() from None
        raise error

    def _ended(self) -> SpmdkitError:
        code = self._process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        why = " The system sends SIGKILL where memory is exhausted: lower data.workers." if code == -9 else ""
        return UserCodeError(
            f"a worker process of {self._what} (shards {self.shards[0]} to {self.shards[-1]}) {how}. A batch needs "
            f"the rows of every worker.{why} A restart continues at the last checkpoint."
        )

    def close(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()


def start_workers(
    data: CheckedStream,
    parts: Sequence[Sequence[int]],
    at: Mapping[str, Any],
    schedule: StreamSchedule,
    **options: bool,
) -> list[Worker]:
    """Returns a worker for each part of the shards; the arguments are those of `OpenShards`.

    Raises:
        ConfigError: the stream cannot be pickled.
    """
    started = list[Worker]()
    try:
        arguments = [cloudpickle.dumps((data, part, at, schedule, options)) for part in parts]
    except Exception as error:
        raise ConfigError(
            f"data.workers: {data.what} cannot be sent to a worker process: {type(error).__name__}: {error}. A worker "
            "receives a pickle of the stream. Open the data in a function under @sk.stream, or set data.workers: 0."
        ) from error
    try:
        for part in parts:
            started.append(Worker(data.what, part))
        for worker, each_arguments in zip(started, arguments, strict=True):
            worker.send(each_arguments)
    except BaseException:
        for worker in started:
            worker.close()
        raise
    return started


def receive_into(link: socket.socket, view: memoryview) -> None:
    """Fills `view`. Raises ConnectionError at the end of the connection."""
    while view:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError
        view = view[count:]


def receive(link: socket.socket) -> bytearray:
    """Returns a message that follows its length."""
    length = bytearray(LENGTH.size)
    receive_into(link, memoryview(length))
    message = bytearray(LENGTH.unpack(length)[0])
    receive_into(link, memoryview(message))
    return message


def main(number: int) -> None:
    """Reads shards and sends their rows; `number` is the file descriptor of the socket."""
    with socket.socket(fileno=number) as link:
        arguments = receive(link)
        threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()
        try:
            _serve(link, arguments)
        except ConnectionError:  # the parent has ended
            pass
        except SpmdkitError as error:
            text = f"{error}{shown_line(error.__cause__)}"
            _send(link, (type(error)(text), [], {}))
        except (Exception, SystemExit) as error:  # noqa: BLE001  such as an import of the stream's library
            text = f"a worker process of data.workers raised {type(error).__name__}: {error}{shown_line(error)}"
            _send(link, (UserCodeError(text), [], {}))
        finally:
            os.killpg(0, signal.SIGKILL)


def _serve(link: socket.socket, arguments: bytearray) -> None:
    data, shards, at, schedule, options = cloudpickle.loads(arguments)
    opened, number = OpenShards(data, shards, at, schedule, **options), at["batch"]
    largest = data.form.empty(len(shards) * schedule.batch_size // at["num_shards"])
    while True:
        number += 1
        rows = [x[: len(shards) * schedule.size(number) // at["num_shards"]] for x in largest]
        _send(link, (None, *opened.read(rows)))
        for leaf in rows:
            link.sendall(leaf.reshape(-1).view(np.uint8).data)


def _send(link: socket.socket, header: tuple[Any, ...]) -> None:
    message = pickle.dumps(header)
    link.sendall(LENGTH.pack(len(message)) + message)


def _end_with_parent(link: socket.socket) -> None:
    """Ends this process and those that it started when the parent closes the socket: it sends nothing else."""
    with contextlib.suppress(ConnectionError):
        link.recv(1)
    os.killpg(0, signal.SIGKILL)
