"""Servers and workers as Ray actors: one process each, on this machine or on a Ray cluster. Needs the extra `ray`.

`address: local` starts a private Ray for this run (ray_local.py). Ray restarts servers (`max_restarts=-1`), without
their state. Ray never repeats a call (`max_task_retries=0`). The caller repeats it, and the servers' tables make that
safe. With Ray's retries a push is applied twice if a server dies between applying and acknowledging it (Ray 2.60,
2026-11-22). Arrays of a push use Ray's object store without a copy. On a cluster, a worker waits for a free node.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spmdkit.config import Config, parse_config
from spmdkit.errors import ConfigError, RendezvousError, UserCodeError
from spmdkit.foundation.timeouts import ACTOR_REPLY_S, RAY_CONNECT_S
from spmdkit.parameter_server.ray_local import LocalRay
from spmdkit.parameter_server.transport import Endpoint, Unavailable, WorkerExit, WorkerHandle


def _check_reachable(address: str) -> None:
    """Raises OSError if no server listens at HOST:PORT. Ray checks other forms of an address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal() and int(port) < 1 << 16:
        socket.create_connection((host.strip("[]"), int(port)), RAY_CONNECT_S).close()


def import_ray() -> Any:
    """Returns the module `ray`. Raises ConfigError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "sync: parameter_server runs its servers and workers on Ray, which is not installed. Install it: pip "
            "install 'spmdkit[ray]'. Without it: transport: threads, all in one process."
        ) from None
    return ray


def process_name() -> str:
    """Returns the name of this process in events."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class ServerActor:
    """A `Server` in a separate process, on the CPU."""

    def __init__(self, values: dict[str, Any], source: str | None, number: int):
        self._server: Any = None
        self._error = ""
        try:
            import jax

            jax.config.update("jax_platforms", "cpu")
            self._server = _roles(values, source).server(number, donate=True)
        except Exception as error:  # noqa: BLE001  reported to the caller; otherwise Ray restarts it indefinitely
            self._error = f"server {number}: {type(error).__name__}: {error}"

    def call(self, method: str, *args: Any) -> Any:
        if self._server is None:
            raise RuntimeError(self._error)
        response = getattr(self._server, method)(*args)
        return {**response, "where": process_name()} if method == "status" else response


class WorkerActor:
    """A `Worker` in a separate process, with separate devices."""

    def where(self) -> str:
        return process_name()

    def run(
        self, values: dict[str, Any], source: str | None, number: int, incarnation: int, servers: list[Any]
    ) -> tuple[str, str, str]:
        from spmdkit.parameter_server.threads import failed
        from spmdkit.parameter_server.worker import FencedError

        os.environ["SPMDKIT_WORKER"] = str(number)
        try:
            from spmdkit.cluster import detect_cluster, join

            config = parse_config(values, source=source)
            devices = join(detect_cluster({}), config.devices).devices  # before the task is created: it may compute
            endpoints = [RayEndpoint(server) for server in servers]
            _roles(values, source).worker(devices, number, incarnation, endpoints).run()
        except (Unavailable, FencedError) as error:
            return "lost", "", str(error)
        except Exception as error:  # noqa: BLE001  the coordinator reports it
            ending = failed(error)
            return ending.status, ending.kind, ending.text
        return "done", "", ""


def _roles(values: dict[str, Any], source: str | None) -> Any:
    from spmdkit.parameter_server.roles import Roles
    from spmdkit.program.opening import task_of

    config = parse_config(values, source=source)
    return Roles(config, task_of(config))


class RayEndpoint:
    """A server, accessed through the handle of its actor."""

    def __init__(self, handle: Any):
        self.handle = handle

    def call_async(self, method: str, *args: Any) -> Callable[[], Any]:
        ray = import_ray()
        errors = ray.exceptions
        lost = (errors.RayActorError, errors.GetTimeoutError, errors.ObjectLostError, errors.OutOfMemoryError)
        try:
            reference, why = self.handle.call.remote(method, *args), ""
        except ray.exceptions.RayActorError as error:
            reference, why = None, first_line(error)

        def response() -> Any:
            if reference is None:
                raise Unavailable(why)
            try:
                return ray.get(reference, timeout=ACTOR_REPLY_S)
            except lost as error:
                raise Unavailable(first_line(error)) from None
            except ray.exceptions.RayTaskError as error:
                raise UserCodeError(f"a parameter server raised: {error.cause or first_line(error)}") from error
            except ray.exceptions.RayError as error:
                raise RendezvousError(
                    f"Ray cannot run a parameter server ({' '.join(str(error).split())[:500]}). Check the memory and "
                    "the load of its machines, and start the same command again."
                ) from error

        return response


def first_line(error: BaseException) -> str:
    """Returns the first line of Ray's multi-line text."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


class RayWorker:
    """One incarnation of a worker, as an actor."""

    def __init__(self, handle: Any, *job: Any):
        self._where = handle.where.remote()  # called first: an actor runs its calls in order
        self._reference = handle.run.remote(*job)

    @property
    def where(self) -> str:
        ray = import_ray()
        ready, _ = ray.wait([self._where], timeout=0)
        try:
            return str(ray.get(self._where)) if ready else ""
        except ray.exceptions.RayError:
            return ""

    def ended(self) -> WorkerExit | None:
        ray = import_ray()
        ready, _ = ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            return WorkerExit(*ray.get(self._reference))
        except ray.exceptions.RayError as error:
            return WorkerExit("lost", "", first_line(error))


class Actors:
    """The transport of `num` servers and workers. Every process imports the task of `config`; the token of a private
    Ray is in the run's `directory`."""

    def __init__(self, config: Config, directory: Path, address: str, num: int, num_bytes: int):
        self._values, self._source = config.model_dump(), None if config.source is None else str(config.source)
        self._local = LocalRay(directory, num, num_bytes) if address == "local" else None
        if self._local is None:
            ray = import_ray()
            try:
                _check_reachable(address)
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except Exception as error:
                raise ConfigError(
                    f"sync: parameter_server.address is {address}, where no Ray cluster responds "
                    f"({first_line(error)}). Start one with `ray start --head`, or use address: local."
                ) from error
        else:
            self._local.start()
        self._handles: list[Any] = []

    def server(self, number: int) -> Endpoint:
        ray = import_ray()
        actor = ray.remote(max_restarts=-1, max_task_retries=0, num_cpus=0)(ServerActor)
        self._handles.append(actor.remote(self._values, self._source, number))
        return RayEndpoint(self._handles[-1])

    def worker(self, number: int, incarnation: int, endpoints: Sequence[Endpoint]) -> WorkerHandle:
        ray = import_ray()
        num_cpus = 1 if self._local is None else 0  # a private Ray always admits a worker that joins
        handle = ray.remote(max_restarts=0, max_task_retries=0, num_cpus=num_cpus)(WorkerActor).remote()
        servers = [endpoint.handle for endpoint in endpoints if isinstance(endpoint, RayEndpoint)]
        self._handles.append(handle)
        return RayWorker(handle, self._values, self._source, number, incarnation, servers)

    def why_waiting(self) -> str:
        if self._local is not None:
            return self._local.newest_error() or "this machine is busy, or has no memory left"
        ray = import_ray()
        free, total = (found().get("CPU", 0) for found in (ray.available_resources, ray.cluster_resources))
        return f"{free:g} of the {total:g} CPUs of the Ray cluster are free, and a worker needs one"

    def close(self) -> None:
        ray = import_ray()
        if ray.is_initialized():
            for handle in self._handles:
                try:
                    ray.kill(handle, no_restart=True)
                except Exception:  # noqa: BLE001  it has already exited
                    continue
            ray.shutdown()
        self._handles.clear()
        if self._local is not None:
            self._local.close()
