"""Environment variables -> `ClusterSpec`: how many processes there are, which one this is, where they meet. Pure.

`READERS` is the table of dialects. Each reader returns a spec, or None when its variables are absent; the first that
answers wins. Slurm, TF_CONFIG, Open MPI and the like are further rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spmdkit.errors import ConfigError

COORDINATOR = "SPMDKIT_COORDINATOR"
NUM_PROCESSES = "SPMDKIT_NUM_PROCESSES"
PROCESS_ID = "SPMDKIT_PROCESS_ID"
DEVICES_PER_PROCESS = "SPMDKIT_DEVICES_PER_PROCESS"
RENDEZVOUS_TIMEOUT_S = "SPMDKIT_RENDEZVOUS_TIMEOUT_S"
VARIABLES = (COORDINATOR, NUM_PROCESSES, PROCESS_ID, DEVICES_PER_PROCESS, RENDEZVOUS_TIMEOUT_S)

DEFAULT_RENDEZVOUS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ClusterSpec:
    """One process's place in the cluster. `coordinator` is `host:port` of process 0, None for a single process."""

    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    devices_per_process: int | None = None
    rendezvous_timeout_s: float = DEFAULT_RENDEZVOUS_TIMEOUT_S


def environment(env: Mapping[str, str]) -> ClusterSpec:
    """Returns this process's place in the cluster; a single process when no reader finds its variables.

    Raises: ConfigError when variables are malformed, incomplete or contradict each other.
    """
    for read in READERS:
        spec = read(env)
        if spec is not None:
            return spec
    return ClusterSpec()


def read_spmdkit(env: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the variables that `spmdkit launch` sets; the whole interface for a launcher of one's own."""
    given = {name: env[name] for name in VARIABLES if env.get(name)}
    if not given:
        return None
    num_processes = _integer(given, NUM_PROCESSES, default=1, least=1)
    process_id = _integer(given, PROCESS_ID, default=0, least=0)
    devices = _integer(given, DEVICES_PER_PROCESS, default=1, least=1) if DEVICES_PER_PROCESS in given else None
    if num_processes > 1:
        absent = [name for name in (COORDINATOR, PROCESS_ID) if name not in given]
        if absent:
            raise ConfigError(
                f"{NUM_PROCESSES}={num_processes} asks for several processes, but {' and '.join(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} not set. Each process needs its own number and the address of "
                f"process 0. Set {COORDINATOR}=host:port and {PROCESS_ID}=0..{num_processes - 1}, or use "
                f"`spmdkit launch -n {num_processes} -- ...` on one machine."
            )
    if process_id >= num_processes:
        raise ConfigError(
            f"{PROCESS_ID}={process_id} with {NUM_PROCESSES}={num_processes}: the numbers run from 0 to "
            f"{num_processes - 1}. Set {NUM_PROCESSES} to the number of processes that are started."
        )
    coordinator = given.get(COORDINATOR) if num_processes > 1 else None
    if coordinator is not None:
        split_address(coordinator)
    return ClusterSpec(coordinator, num_processes, process_id, devices, _timeout(given))


# Order matters: what was set for spmdkit by name wins over what a scheduler left in the environment.
READERS: tuple[Callable[[Mapping[str, str]], ClusterSpec | None], ...] = (read_spmdkit,)


def split_address(address: str) -> tuple[str, int]:
    """Returns (host, port) of `host:port` or `[ipv6]:port`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{COORDINATOR}={address!r} is no address. It is host:port of process 0 with a port from 1 to 65535, "
            f"for example 10.0.0.1:8476."
        )
    return host, int(port)


def _integer(given: Mapping[str, str], name: str, *, default: int, least: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"{name}={text!r}: expected a whole number of at least {least}. Set {name}={least} or more.")
    return int(text)


def _timeout(given: Mapping[str, str]) -> float:
    text = given.get(RENDEZVOUS_TIMEOUT_S)
    if text is None:
        return DEFAULT_RENDEZVOUS_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 86400:
        raise ConfigError(
            f"{RENDEZVOUS_TIMEOUT_S}={text!r}: expected seconds, more than 0 and less than a day. "
            f"Set {RENDEZVOUS_TIMEOUT_S}={DEFAULT_RENDEZVOUS_TIMEOUT_S:.0f}."
        )
    return value
