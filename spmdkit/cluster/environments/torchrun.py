"""torchrun, static and elastic, and other starters that set its variables (`accelerate launch`, DeepSpeed).

MASTER_ADDR is the host of process 0. torchrun's agent already uses MASTER_PORT for its store
(TORCHELASTIC_USE_AGENT_STORE=True; PyTorch 2.13, 2026-11-22), so the rendezvous uses a port derived from it. Without
LOCAL_RANK no starter set up this process: PyTorchJob sets the rest for each pod, for a torchrun inside it.
Names: docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import DetectedCluster, Detection, Partial, address, port_of, shown, whole_number
from spmdkit.cluster.spec import ClusterSpec, Names

NAMES = Names("WORLD_SIZE", "RANK", "MASTER_ADDR")

PORT, LOCAL_RANK, AGENTS = "MASTER_PORT", "LOCAL_RANK", "GROUP_WORLD_SIZE"
AGENT_HAS_PORT = "TORCHELASTIC_USE_AGENT_STORE"

START = "torchrun --nnodes=N --nproc-per-node=M -m spmdkit train ..."
REPAIR = (
    "torchrun runs on every host with the same --rdzv-endpoint, and every host connects to that of MASTER_ADDR: "
    f"{START}."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster of a worker of torchrun."""
    size, rank, port = whole_number(env, "WORLD_SIZE"), whole_number(env, "RANK"), whole_number(env, PORT)
    host, local = env.get("MASTER_ADDR"), whole_number(env, LOCAL_RANK)
    if size is None or rank is None:
        return None
    if local is None:
        why = f"WORLD_SIZE={size} and RANK={rank} are set, but LOCAL_RANK is not"
        repair = f"Start it with torchrun, which sets LOCAL_RANK for each process: {START}."
        return Partial(why, repair, "allocation", size)
    if not host or port is None or not 0 < port < 65536 or rank >= size:
        repair = (
            f"RANK is less than WORLD_SIZE, and MASTER_ADDR:MASTER_PORT is process 0. Start it with torchrun: {START}."
        )
        why = f"LOCAL_RANK={local} is set, but the rest does not give a rank ({shown(env, *NAMES, PORT)})"
        return Partial(why, repair, "starter")
    free_port = port_of(port + 1) if env.get(AGENT_HAS_PORT) == "True" else port
    spec = ClusterSpec(address(host, free_port) if size > 1 else None, size, rank, names=NAMES)
    return DetectedCluster(spec, "starter", agents=whole_number(env, AGENTS), repair=REPAIR)
