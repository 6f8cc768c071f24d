"""spmdkit's own variables: `spmdkit launch` sets them, and any other starter may.

`SPMDKIT_NUM_PROCESSES` alone is a requirement: another environment must have this number of processes. The remaining
variables override those of another environment; `detection.py` applies them.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import DetectedCluster, Detection, Partial
from spmdkit.cluster.spec import OURS, ClusterSpec, split_address
from spmdkit.errors import ConfigError

NAMES = OURS

REPAIR = (
    f"Each process needs its own {NAMES.process_id}, and all connect to {NAMES.coordinator}. `spmdkit launch -n N -- "
    "...` starts all of them on one machine, `spmdkit launch --on ssh -n N -- ...` on several."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster that spmdkit's variables describe.

    Raises:
        ConfigError: a variable is malformed, or they contradict each other.
    """
    variables = {name: env[name] for name in NAMES if env.get(name)}
    if NAMES.num_processes not in variables and NAMES.process_id not in variables:
        return None
    num_processes = integer(variables, NAMES.num_processes, default=1, least=1)
    process_id = integer(variables, NAMES.process_id, default=0, least=0)
    absent = [name for name in (NAMES.coordinator, NAMES.process_id) if name not in variables]
    if num_processes > 1 and absent:
        return Partial(
            f"{NAMES.num_processes}={num_processes} requires several processes, but {' and '.join(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} not set",
            f"Each process needs its own number and the address of process 0. Set {NAMES.coordinator}=host:port and "
            f"{NAMES.process_id}=0..{num_processes - 1}, or use `spmdkit launch -n {num_processes} -- ...` on one "
            "machine.",
            "explicit",
            num_processes,
        )
    if process_id >= num_processes:
        raise ConfigError(
            f"{NAMES.process_id}={process_id} with {NAMES.num_processes}={num_processes}: the numbers run from 0 to "
            f"{num_processes - 1}. Set {NAMES.num_processes} to the number of processes that are started."
        )
    coordinator = variables.get(NAMES.coordinator) if num_processes > 1 else None
    if coordinator is not None:
        split_address(coordinator)
    return DetectedCluster(ClusterSpec(coordinator, num_processes, process_id, names=NAMES), "explicit", repair=REPAIR)


def integer(given: Mapping[str, str], name: str, *, default: int, least: int) -> int:
    """Returns the integer that a variable holds.

    Raises:
        ConfigError: it holds another value.
    """
    text = given.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"{name}={text!r}: expected a whole number of at least {least}. Set {name}={least} or more.")
    return int(text)
