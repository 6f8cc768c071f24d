"""Open MPI: `mpirun` sets the rank of each process and the address of its daemon. Process 0 runs on the daemon's host,
unless a host file specifies another. Processes on one host use its loopback interface.

Open MPI 4 sets the daemon's addresses and the job number, a multiple of 4096 (OMPI_MCA_orte_hnp_uri). Open MPI 5 sets
the daemon's host name in PMIX_NAMESPACE (`prterun-HOST-PID@1`), which jax 0.10.2 does not detect.
Names: Open MPI 4.1.4 and 5.0.10, 2026-11-23; docs.open-mpi.org, "Environment variables set by mpirun".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spmdkit.cluster.environments.base import DetectedCluster, Detection, Partial, address, port_of, shown, whole_number
from spmdkit.cluster.spec import ClusterSpec, Names

NAMES = Names("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri")

ON_THIS_HOST, NAMESPACE = "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"
DAEMONS, STEP_OF_DAEMONS = "OMPI_MCA_orte_num_nodes", "SLURM_STEP_NUM_TASKS"

OF_MPICH = ("PMI_SIZE", "PMI_RANK")
"""Variables of mpirun of MPICH and Intel MPI: they do not contain an address."""

JOBS_APART = 1 << 12
"""Job numbers of Open MPI 4 are multiples of this."""

REPAIR = (
    "Process 0 is assumed to run on the host of mpirun. Where a host file puts it elsewhere, name that host: "
    "mpirun -x SPMDKIT_COORDINATOR=HOST:PORT ..."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster of a process that mpirun started."""
    size, rank = whole_number(env, NAMES.num_processes), whole_number(env, NAMES.process_id)
    if size is None or rank is None:
        if (whole_number(env, OF_MPICH[0]) or 1) == 1:
            return None
        return _incomplete(f"mpirun of MPICH has started several processes ({shown(env, *OF_MPICH)})")
    met = _coordinator(env, size)
    if rank >= size or (met is None and size > 1):
        return _incomplete(f"mpirun's variables do not give this process a rank ({shown(env, *NAMES, NAMESPACE)})")
    spec = ClusterSpec(met if size > 1 else None, size, rank, names=NAMES)
    return DetectedCluster(spec, "starter", agents=_daemons(env), repair=REPAIR)


def _incomplete(why: str) -> Partial:
    repair = (
        "Start it with mpirun of Open MPI 4 or 5, or set the address of process 0: mpirun -x "
        "SPMDKIT_COORDINATOR=HOST:PORT -x SPMDKIT_NUM_PROCESSES=N, and SPMDKIT_PROCESS_ID for each process."
    )
    return Partial(why, repair, "starter")


def _daemons(env: Mapping[str, str]) -> int | None:
    """Returns the number of daemons that mpirun has started: one on each host except its own. In a Slurm job mpirun
    uses srun, so the step has as many tasks."""
    hosts = whole_number(env, DAEMONS)
    if hosts is not None:
        return hosts - 1 if hosts > 1 else None
    return whole_number(env, STEP_OF_DAEMONS)


def _coordinator(env: Mapping[str, str], size: int) -> str | None:
    """Returns `host:port` of process 0, None if the daemon's host is unknown."""
    uri = env.get(NAMES.coordinator, "")
    daemon = re.match(r"(\d+)\.\d+;", uri)
    newer = re.fullmatch(r"[^-]+-(.+)-(\d+)@\d+", env.get(NAMESPACE, ""))
    if daemon is not None:
        number, host = int(daemon[1]) // JOBS_APART, _first_address(uri)
    elif newer is not None:
        number, host = int(newer[2]), newer[1]
    else:
        return None
    local = whole_number(env, ON_THIS_HOST) == size
    if not host and not local:
        return None
    return address("127.0.0.1" if local else host, port_of(number))


def _first_address(uri: str) -> str:
    """Returns the first address of `7.0;tcp://10.0.0.1,10.1.0.1:34911;tcp6://[fd00::2]:45179`, IPv4 before IPv6."""
    match = re.search(r"tcp://([^,:;]+)", uri) or re.search(r"tcp6://\[([^],]+)", uri)
    return match[1] if match else ""
