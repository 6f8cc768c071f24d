"""`join`: configures JAX for the requested devices, joins the other processes, returns the `Cluster`."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import jax

from spmdkit import compat
from spmdkit.cluster import barrier
from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.interface import Advertised, by_name, choose
from spmdkit.cluster.rendezvous import rendezvous, wait_for_service
from spmdkit.cluster.service import ServiceConnection, ServiceProcess, bypass_proxies
from spmdkit.cluster.spec import ClusterSpec
from spmdkit.cluster.store import open_store
from spmdkit.compat import gloo as compat_gloo
from spmdkit.compat import membership as compat_membership
from spmdkit.errors import ConfigError, RendezvousError
from spmdkit.foundation.constants import MAX_FAKE_DEVICES, fake_devices
from spmdkit.foundation.timeouts import (
    COLLECTIVE_MARGIN_S,
    FIRST_COMPARISON_S,
    JAX_INITIALIZE_S,
    SERVICE_HEARTBEAT_S,
    SERVICE_SHUTDOWN_S,
)


class Generation(NamedTuple):
    """One of several clusters that a process joins in sequence."""

    number: int  # counted from 1; from 2 on a launcher has checked that all processes are ready
    creating_devices: AbstractContextManager[None]  # entered while JAX creates the devices


def join(
    spec: ClusterSpec,
    devices: str | Sequence[int] = "auto",
    collective_timeout_s: float | None = None,
    interface: str = "auto",
    generation: Generation | None = None,
) -> Cluster:
    """Returns the cluster of all processes in `spec` with the requested devices.

    If `jax.distributed.initialize` has been called already (ray.train's JaxTrainer, a user's program), its processes
    are used, and it is not called again.

    Args:
        devices: `auto` (all that JAX finds), `cpu:N` (N fake CPU devices in total over all processes;
            `spec.devices_per_process` overrides it), or a list of local device indices, the same on every process.
        collective_timeout_s: the longest wait for a process; CPU collectives fail a little later.
        interface: the network interface of CPU collectives, see interface.py.
        generation: set if this process may disconnect and join again.

    Raises:
        RendezvousError: processes did not start in time.
        ConfigError: the devices do not exist.
    """
    joined = jax.distributed.is_initialized()
    num_processes = compat.num_joined_processes() if joined else spec.num_processes
    num_cpu = _cpu_devices_per_process(spec, devices, num_processes)
    if not compat.backends_initialized():
        _configure(spec, devices, num_cpu, num_processes, collective_timeout_s)
    elif num_processes > 1 and not joined:
        raise ConfigError(
            f"the job has {num_processes} processes, but JAX has already created the devices of this one. Processes "
            "must join before the first use of JAX. Move the code that computes with JAX into the task's functions."
        )
    notes = _how(spec, joined, num_processes)
    advertised, connection = Advertised(None), None
    if num_processes > 1 and not joined:
        advertised = choose(interface, spec.coordinator or "localhost:1")
        compat_gloo.advertise(advertised.address)
        notes += (advertised.reason,) if advertised.reason else ()
        if generation is not None:
            compat_membership.survive_peer_failure()
        bound, connection = _initialize(spec, is_first=generation is None or generation.number == 1)
        notes += exposure_warning(spec, bound)
    with generation.creating_devices if generation is not None else nullcontext():
        found = jax.devices("cpu") if num_cpu is not None else jax.devices()
    if num_processes > 1 and not joined:
        client = barrier.Client(compat.coordination_client(), num_processes)
        client.can_end = generation is not None
        compat.replace_coordination_client(client)
    cluster = Cluster(
        process_index=jax.process_index(),
        num_processes=num_processes,
        devices=(),
        store=open_store(),
        notes=notes,
        advertises=advertised.address or by_name(),
        namespace=None if generation is None else f"spmdkit/generation/{generation.number}",
        connection=connection,
    )
    _set_devices(cluster, lambda: _choose(found, spec, devices, num_cpu, num_processes))
    return cluster


def _set_devices(cluster: Cluster, choose: Callable[[], list[jax.Device]]) -> None:
    """Sets the devices of the cluster. If `choose` raises on one process, the others raise RendezvousError with the
    reason."""

    def chosen() -> str:
        cluster.devices = choose()
        return ""

    cluster.first_problem("devices", chosen, FIRST_COMPARISON_S)


def _how(spec: ClusterSpec, joined: bool, num_processes: int) -> tuple[str, ...]:
    if joined and spec.num_processes != num_processes:
        return (f"{num_processes} processes, since jax.distributed is initialized already",)
    source = f"{num_processes} processes: {spec.found_by}"
    return (source, *spec.notes) if num_processes > 1 and spec.found_by else spec.notes


def _cpu_devices_per_process(spec: ClusterSpec, devices: str | Sequence[int], num_processes: int) -> int | None:
    """Returns how many fake CPU devices each process needs, or None unless `cpu:N` is requested."""
    if not isinstance(devices, str) or devices == "auto":
        return None
    total = fake_devices(devices)
    if total is None:
        raise ConfigError(
            f"devices is {devices!r}. It is auto, cpu:N with N from 1 to {MAX_FAKE_DEVICES}, or a list of local device "
            "indices. Try devices: cpu:8."
        )
    if spec.devices_per_process is not None:
        return spec.devices_per_process
    if total % num_processes:
        fitting = max(1, total // num_processes) * num_processes
        raise ConfigError(
            f"devices: cpu:{total} over {num_processes} processes leaves a remainder of {total % num_processes}. "
            f"Every process has the same number of devices. Try devices: cpu:{fitting}, or `launch "
            "--devices-per-process`."
        )
    return total // num_processes


def num_threads(num_devices: int) -> int:
    """Returns the size of XLA's thread pools (environment variable `NPROC`) for a number of fake CPU devices: two for
    each device, and not fewer than there are cores.

    An execution occupies one thread for each device: a collective blocks the thread of a waiting device, and the
    collectives of one execution follow one another (CollectiveThunk::resource_uses in xla/backends/cpu/runtime). A
    launch occupies another thread for each device: from 32 executions in flight on, it waits in a pool's thread until
    one of them ends. With 2 D - 1 threads for D devices the launches hold what the executions need, and these wait
    forever ("Expected 2 threads to join the rendezvous"). jaxlib 0.10.2: 34 executions in flight end with 2 D threads,
    and hang with 2 D - 1; 30 end with D threads (D = 2 and 4, one and two processes, 2026-11-28).

    More threads cost time, because XLA splits every product into as many parts: with five instead of four, a step of
    the byte GPT on two devices and two cores takes a tenth longer. Creating 16,000 threads takes 39 s: beyond 256
    devices there is one for each device.
    """
    return max(os.cpu_count() or 1, num_devices + min(num_devices, 256))


def _configure(
    spec: ClusterSpec,
    devices: str | Sequence[int],
    num_cpu: int | None,
    num_processes: int,
    collective_timeout_s: float | None,
) -> None:
    """Sets the options that JAX reads when it creates its devices, for the entire process."""
    if (on_cpu := num_cpu or spec.devices_per_process or 1) > 1:
        os.environ.setdefault("NPROC", str(num_threads(on_cpu)))
    if num_cpu is not None:
        jax.config.update("jax_platforms", "cpu")
        # More devices than requested are harmless; fewer than another caller in this process requested are not.
        already: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", max(num_cpu, already))
    elif spec.devices_per_process is not None:
        # Takes effect only on CPU; on other platforms `_choose` compares the number.
        jax.config.update("jax_num_cpu_devices", spec.devices_per_process)
    if not isinstance(devices, str):
        # Keeps JAX off the memory of other GPUs; no effect on CPU and TPU, where `_choose` selects devices.
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, devices)))
        jax.config.update("jax_rocm_visible_devices", ",".join(map(str, devices)))
    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        compat.lower_reduce_scatter_as_all_to_all()
        if collective_timeout_s is not None:
            compat.set_cpu_collective_timeout(int(collective_timeout_s) + COLLECTIVE_MARGIN_S)


def exposure_warning(spec: ClusterSpec, bound: str) -> tuple[str, ...]:
    """Returns a warning if process 0 listens on all network interfaces of its machine."""
    if spec.process_id != 0 or not bound.startswith("0.0.0.0:"):
        return ()
    text = (
        f"the coordinator listens on {bound}, on every network of this machine: {spec.coordinator} is not one of its "
        "addresses (address translation, or a typing error). Any host that reaches the port can end the job. Block the "
        "port for all machines outside the job."
    )
    return (text,)


def _initialize(spec: ClusterSpec, is_first: bool = True) -> tuple[str, ServiceConnection]:
    """Connects to JAX's coordination service, which process 0 starts unless a launcher runs it. Returns the address
    that process 0 has bound, and the connection."""
    service_process = (
        ServiceProcess(spec.num_processes, spec.process_id) if spec.process_id == 0 and spec.service is None else None
    )
    try:
        bind = rendezvous(spec) if is_first else wait_for_service(spec, JAX_INITIALIZE_S)
    except BaseException:
        if service_process is not None:
            service_process.kill()
        raise
    if service_process is not None:
        service_process.listen(bind)
        service_process.wait_until_up(bind)
    # JAX warns about proxy variables at every start; the rendezvous has shown that the address is reachable.
    jax_log = logging.getLogger("jax._src.distributed")
    level = jax_log.level
    jax_log.setLevel(logging.ERROR)
    bypass_proxies()
    connection = ServiceConnection(spec.service or spec.coordinator or bind)
    try:
        with compat.without_local_service(None if service_process is None else service_process.shutdown):
            jax.distributed.initialize(
                coordinator_address=connection.address,
                num_processes=spec.num_processes,
                process_id=spec.process_id,
                cluster_detection_method="deactivate",
                initialization_timeout=JAX_INITIALIZE_S,
                heartbeat_timeout_seconds=SERVICE_HEARTBEAT_S,
                shutdown_timeout_seconds=SERVICE_SHUTDOWN_S,
                coordinator_bind_address=bind,
            )
    except RuntimeError as error:
        raise RendezvousError(
            f"process {spec.process_id} of {spec.num_processes} could not join at {spec.coordinator}: "
            f"{str(error).splitlines()[0]}. All processes were ready a moment ago, so one ended while starting. "
            f"See its output and start all again."
        ) from error
    finally:
        connection.close()
        jax_log.setLevel(level)
    if threading.current_thread() is threading.main_thread():
        # JAX's preemption notifier has replaced Python's handler of SIGTERM, and ignores the signal until polled.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    return bind, connection


def _choose(
    found: list[jax.Device], spec: ClusterSpec, devices: str | Sequence[int], num_cpu: int | None, num_processes: int
) -> list[jax.Device]:
    local = [[d for d in found if d.process_index == p] for p in range(num_processes)]
    if num_cpu is not None:
        for process, of_process in enumerate(local):
            if len(of_process) < num_cpu:
                platform = of_process[0].platform if of_process else "no"
                raise ConfigError(
                    f"devices: {devices} needs {num_cpu} in process {process}, found {len(of_process)} {platform} "
                    "device(s). JAX creates its devices once, at its first use. Request at most "
                    f"{len(of_process)}, or call spmdkit before any code computes with JAX."
                )
        return [d for of_process in local for d in of_process[:num_cpu]]
    if isinstance(devices, str):
        expected = spec.devices_per_process
        if expected is not None and any(len(of_process) != expected for of_process in local):
            raise ConfigError(
                f"SPMDKIT_DEVICES_PER_PROCESS is {expected}, found {[len(p) for p in local]} devices in the processes "
                f"({found[0].platform}). Each process must see exactly this number. Hide devices "
                f"(CUDA_VISIBLE_DEVICES), or omit --devices-per-process."
            )
        return found
    indices = list(devices)
    if not indices or len(set(indices)) != len(indices) or min(indices) < 0:
        raise ConfigError(f"devices: {indices} must be distinct indices of at least 0. Try devices: [0].")
    if found[0].platform in ("gpu", "cuda", "rocm") and all(len(of_process) == len(indices) for of_process in local):
        return found  # `_configure` has hidden all other devices
    for process, of_process in enumerate(local):
        if max(indices) >= len(of_process):
            raise ConfigError(
                f"devices: {indices} names device {max(indices)}, found {len(of_process)} {found[0].platform} "
                f"device(s) in process {process}. They are counted from 0. Use indices up to {len(of_process) - 1}, or "
                "devices: auto for all."
            )
    return [of_process[i] for of_process in local for i in indices]
